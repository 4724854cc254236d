"""Which way the bytes travel: all-reduce algorithms as data, pure and without communication."""

from gradsync.allreduce.drawing import draw
from gradsync.allreduce.halving_doubling import HalvingDoubling, halving_doubling
from gradsync.allreduce.hierarchical import Hierarchical, hierarchical
from gradsync.allreduce.native import Native, native
from gradsync.allreduce.pricing import price
from gradsync.allreduce.proof import check
from gradsync.allreduce.ring import Ring, ring
from gradsync.allreduce.schedule import Recipe, Round, Schedule, Transfer, chunk_bounds
from gradsync.allreduce.tree import Tree, tree

__all__ = [
    "HalvingDoubling",
    "Hierarchical",
    "Native",
    "Recipe",
    "Ring",
    "Round",
    "Schedule",
    "Transfer",
    "Tree",
    "check",
    "chunk_bounds",
    "draw",
    "halving_doubling",
    "hierarchical",
    "native",
    "price",
    "ring",
    "tree",
]
