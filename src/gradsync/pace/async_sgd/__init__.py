"""Asynchronous SGD with bounded staleness.

Along a push: `asynchronous` packs the gradients (`payload`), `mail` carries them (`message`), the `owner` decides
when they become an update (`clocks`) of its `shard`, which a `optimizer_copy` of the user's optimizer makes.
"""
