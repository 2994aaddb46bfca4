"""Integrations with other crawlers and HTTP clients, one module each."""
