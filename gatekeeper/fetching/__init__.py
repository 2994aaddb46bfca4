"""Fetching robots.txt files over HTTP and caching what is known about each origin."""
