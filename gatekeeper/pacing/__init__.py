"""Pacing: which request of which host may start, and when."""
