"""The ways that bytes travel: all-reduce algorithms as data, pure and without communication.

A recipe (`ring.ring()`, `tree.tree()`, …) makes a `schedule.Schedule` for any ranks and hosts;
`check.check` proves that it adds every contribution once, `price.price` costs it, `draw.draw` shows it.
"""
