"""The audit record: an append-only, hash-chained record of what a gate did."""
