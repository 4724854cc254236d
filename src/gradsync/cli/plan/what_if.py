"""Inputs with one number changed: another network, more GPUs, a larger batch."""

from __future__ import annotations

from dataclasses import replace

from gradsync.cluster import Cluster, Link
from gradsync.planner.profile import ModelProfile


def narrow_link(cluster: Cluster) -> Link:
    """The link that "bandwidth" speaks of: between hosts, or inside the only one.

    >>> from gradsync.cluster import as_hosts
    >>> fast, slow = Link(1e-6, 1e11), Link(1e-5, 1e9)
    >>> narrow_link(Cluster(as_hosts(2), fast, slow)) is fast, narrow_link(Cluster(((0,), (1,)), fast, slow)) is slow
    (True, True)
    """
    return cluster.across if len(cluster.hosts) > 1 else cluster.inside


def with_bandwidth(cluster: Cluster, bandwidth: float) -> Cluster:
    """The narrow link at so many bytes per second of large messages; smaller ones in proportion."""
    return with_faster_link(cluster, bandwidth / narrow_link(cluster).bandwidth)


def with_faster_link(cluster: Cluster, factor: float) -> Cluster:
    """The narrow link so many times as fast; shared memory, where that is the link, with it.

    >>> from gradsync.cluster import as_hosts
    >>> with_faster_link(Cluster(as_hosts(2), Link(0, 10.0, ((1.0, 4.0),)), Link(0, 10.0)), 2.0).inside
    Link(latency_s=0, bandwidth=20.0, curve=((1.0, 8.0),), load=0.0, spread=0.0)
    """
    if len(cluster.hosts) > 1:
        return replace(cluster, across=_faster(cluster.across, factor))
    memory = None if cluster.memory is None else _faster(cluster.memory, factor)
    return replace(cluster, inside=_faster(cluster.inside, factor), memory=memory)


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return a cluster of so many ranks on hosts of the same size; the last one may have fewer.

    >>> with_gpus(Cluster(((0, 1),), Link(0, 1.0), Link(0, 1.0)), 5).hosts
    ((0, 1), (2, 3), (4,))
    """
    size = max(map(len, cluster.hosts))
    return replace(cluster, hosts=tuple(tuple(range(i, min(i + size, gpus))) for i in range(0, gpus, size)))


def with_tokens(profile: ModelProfile, tokens: float) -> ModelProfile:
    """Return a profile for so many tokens per GPU and step: computation in proportion, the optimizer as it is."""
    return with_slower_compute(profile, tokens / profile.tokens, optimizer=False, tokens=tokens)


def with_slower_compute(
    profile: ModelProfile, factor: float, optimizer: bool = True, tokens: float | None = None
) -> ModelProfile:
    """Every part of the step so many times as long.

    >>> import torch
    >>> from gradsync.planner.profile import Gradient
    >>> profile = ModelProfile((Gradient("w", (10,), torch.float32, 0.5),), forward_s=1.0, backward_s=2.0, tokens=10)
    >>> slower = with_slower_compute(profile, 2.0)
    >>> slower.compute_s, slower.gradients[0].ready_s, with_tokens(profile, 20).compute_s
    (6.0, 1.0, 6.0)
    """
    return replace(
        profile,
        gradients=tuple(gradient._replace(ready_s=factor * gradient.ready_s) for gradient in profile.gradients),
        forward_s=factor * profile.forward_s,
        backward_s=factor * profile.backward_s,
        optimizer_s=(factor if optimizer else 1.0) * profile.optimizer_s,
        input_s=factor * profile.input_s,
        tokens=profile.tokens if tokens is None else tokens,
    )


def _faster(link: Link, factor: float) -> Link:
    curve = tuple((size, factor * rate) for size, rate in link.curve)
    return replace(link, bandwidth=factor * link.bandwidth, curve=curve)
