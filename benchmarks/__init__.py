"""Our figures beside the peers', measured again by one command: `python -m benchmarks`.

Every figure is a ratio within one run: contenders do the same work on the same inputs, in
an order shuffled anew each round, and the medians of processor time are compared. Absolute
numbers belong to the machine; the ratios are what is promised.
"""
