"""Thin adapters for other crawlers, one file each."""
