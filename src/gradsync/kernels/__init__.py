"""Hot loops: plain C for CPUs, with the torch reference beside it."""
