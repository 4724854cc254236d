"""What travels: recipes that turn gradients into few bytes, as data; pure and without communication.

A recipe (`integers.int8()`, `warmup.warmup(c, steps)`, …) decides for each parameter, as one `choice.Choice`.
Its codec is of one of four families, which differ in how their payloads meet those of other ranks:

    cast        every element in 16 bits                        added as they are
    randomk     the same few elements on every rank             added as they are
    powersgd    two thin factors of a matrix                    added, one factor after the other
    blocks      a scale or indices per block, few bits each     decoded, then added

`blocks.partition` says where each block's bytes lie, and `kernels.blocks` fills them; `recipes` writes any
composition as plain data and reads it back.
"""
