"""Benchmarks of gatekeeper and its peers: `python -m benchmarks` measures all figures.

Every figure is a ratio from one run: contenders do the same work on the same inputs, in an order
that is shuffled each round, and medians of processor time are compared. Absolute numbers depend on
the machine; the ratios are comparable.
"""
