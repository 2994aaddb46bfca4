"""For owners of sites: lint, fixes, witnesses, compose and diff, and the readers of their files."""
