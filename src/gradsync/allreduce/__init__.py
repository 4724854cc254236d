"""Which way the bytes travel: all-reduce algorithms as data, pure and without communication."""

from gradsync.allreduce.native import Native, native

__all__ = ["Native", "native"]
