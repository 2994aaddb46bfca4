"""The parts of `gatekeeper fetch`: crawl, manifest, bodies, WARC files and progress."""
