"""What `gatekeeper fetch` is made of: the crawl, its manifest, bodies, WARC and progress."""
