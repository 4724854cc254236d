"""The compressors: recipes that turn gradients into few bytes, as data; without communication.

A recipe (`integers.int8()`, `wrappers.warmup(c, steps)`, …) decides for each parameter, as one `recipe.Choice`. What
a codec is, is in one file: its arguments, what it keeps, what it computes, and its rounds (`rounds`), which the
pipeline runs, the planner prices and the probe times.

    cast        every element in 16 bits                        one sum
    randomk     the same few elements on every rank             one sum
    powersgd    two thin factors of a matrix                    two sums, one factor after the other
    blocks      a scale or indices per block, few bits each     gathered and decoded, then added

`blocks.partition` says where each block's bytes lie, and `kernels.block_kernels` fills them; `toml` writes any
composition as plain data and reads it back.
"""
