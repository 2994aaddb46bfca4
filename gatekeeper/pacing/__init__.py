"""Whose turn it is, and when."""
