"""Asynchronous SGD with bounded staleness.

Along a push: `asynchronous` packs the gradients (`freight`), `post` carries them (`letter`), the `owner` decides
when they become an update (`clocks`) of its `shard`, which a `twin` of the user's optimizer makes.
"""

from gradsync.pace.asynchronous.asynchronous import Asynchronous

__all__ = ["Asynchronous"]
