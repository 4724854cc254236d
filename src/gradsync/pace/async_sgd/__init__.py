"""Asynchronous SGD with bounded staleness.

Along a push: `worker` packs the gradients (`messages`), `mail` carries them, the `owner` decides when they become an
update (`staleness`) of its `shard`, which an `optimizer_copy` of the user's optimizer makes.
"""
