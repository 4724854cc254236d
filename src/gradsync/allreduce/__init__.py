"""Which way the bytes travel: all-reduce algorithms as data, pure and without communication.

A recipe (`ring.ring()`, `tree.tree()`, …) makes a `schedule.Schedule` for any ranks and hosts;
`proof.check` proves that it adds every contribution once, `pricing.price` costs it, `drawing.draw` shows it.
"""
