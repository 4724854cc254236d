"""The work of `gs.auto()`: profile a few steps, probe the links, choose a plan, and look after its prediction.

The package is not called `auto`, since importing it would then take the place of the function `gs.auto`.
"""
