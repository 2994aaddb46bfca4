"""Getting the text of a robots.txt over HTTP, and keeping what was learnt."""
