"""A cluster is the same after a file, and a file that is none is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradsync.cluster import Cluster, CodecSpeed, Device, Hosts, Link, as_hosts

PAGE = (Path(__file__).parent.parent / "docs" / "links.md").read_text(encoding="utf-8")

zero_or_more = st.floats(0, 1e15) | st.integers(0, 10**15)
positive = st.floats(1e-9, 1e15) | st.integers(1, 10**15)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def curves(draw: st.DrawFn) -> tuple[tuple[float, float], ...]:
    sizes = sorted(draw(st.sets(st.floats(1, 1e9), max_size=4)))
    return tuple((size, draw(positive)) for size in sizes)


@st.composite
def any_hosts(draw: st.DrawFn) -> Hosts:
    """Alike and in order, or not."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = list(range(sum(sizes)))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(tuple(ranks[end - size : end]) for size, end in zip(sizes, ends, strict=True))


links = st.builds(Link, zero_or_more, positive, curves(), st.floats(0, 1), zero_or_more)
codecs = st.builds(CodecSpeed, names, *[zero_or_more] * 6)
devices = st.builds(
    Device,
    name=names,
    kind=st.sampled_from(["cpu", "gpu"]),
    flops=zero_or_more,
    memory_nbytes=zero_or_more,
    memory_bandwidth=positive,
    cores=positive,
    codecs=st.lists(codecs, max_size=3).map(tuple),
    call_s=zero_or_more,
    jitter=zero_or_more,
)
clusters = st.builds(
    Cluster,
    any_hosts(),
    inside=links,
    across=links,
    shared_nic=st.booleans(),
    reduce_s_per_byte=zero_or_more,
    memory=st.none() | links,
    backend=st.sampled_from(["gloo", "nccl"]),
    device=devices,
    calibrated=st.booleans(),
    name=names,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cluster=clusters)
def test_a_cluster_is_the_same_after_a_file(cluster: Cluster, tmp_path: Path) -> None:
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster
    cluster.save(str(tmp_path / "cluster.toml"))
    assert Cluster.load(str(tmp_path / "cluster.toml")) == cluster


def test_hosts_that_are_alike_are_two_numbers_in_the_file(tmp_path: Path) -> None:
    wire = Link(1e-6, 1e9)
    alike, unlike = tmp_path / "alike.toml", tmp_path / "unlike.toml"
    Cluster(((0, 1), (2, 3)), wire, wire).save(alike)
    Cluster(((0, 2), (1, 3)), wire, wire).save(unlike)
    assert "num_hosts = 2\nranks_per_host = 2\n" in alike.read_text()
    assert "hosts = [[0, 2], [1, 3]]\n" in unlike.read_text()


def test_one_host_needs_no_link_across(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("num_hosts = 1\nranks_per_host = 2\n[inside]\nlatency_s = 0\nbandwidth = 1e9\n")
    assert Cluster.load(path) == Cluster(as_hosts(2), Link(0, 1e9), Link(0, 1e9))


GOOD = {
    "top": "num_hosts = 2\nranks_per_host = 2",
    "inside": "latency_s = 1e-6\nbandwidth = 1e9",
    "across": "latency_s = 1e-5\nbandwidth = 1e8",
}
HOSTILE = {
    "unknown field": ({"top": "num_host = 2"}, "unknown cluster field 'num_host'; a cluster has across, backend, "),
    "its near name": ({"top": "num_host = 2"}, "; did you mean 'num_hosts'?"),
    "unknown link field": (
        {"inside": "latency_s = 0\nbandwith = 1e9"},
        "[inside]: unknown link field 'bandwith'; a link has bandwidth, curve, latency_s, load, spread; "
        "did you mean 'bandwidth'?",
    ),
    "no bandwidth": ({"across": "latency_s = 0"}, "[across]: the field 'bandwidth' is missing; a link needs latency_s"),
    "no across": ({"across": ""}, "[across] is missing, the link between the 2 hosts"),
    "no inside": ({"inside": ""}, "the field 'inside' is missing"),
    "no hosts": ({"top": ""}, "num_hosts is missing; a cluster needs num_hosts and ranks_per_host, or hosts"),
    "half the hosts": ({"top": "num_hosts = 2"}, "ranks_per_host is missing"),
    "hosts twice": (
        {"top": "hosts = [[0], [1]]\nnum_hosts = 2"},
        "hosts names every rank already, leave num_hosts out",
    ),
    "hosts in words": ({"top": "hosts = 'two'"}, "hosts must be one list of ranks per host, as in [[0, 1], [2]]"),
    "hosts flat": ({"top": "hosts = [0, 1]"}, "hosts must be one list of ranks per host"),
    "a rank twice": ({"top": "hosts = [[0], [0]]"}, "hosts must name every rank from 0 to 1 once"),
    "no rank": ({"top": "hosts = [[]]"}, "hosts must be one list of ranks per host, none of them empty"),
    "zero hosts": ({"top": "num_hosts = 0\nranks_per_host = 1"}, "num_hosts must be a whole number from 1 to"),
    "half a host": ({"top": "num_hosts = 1.5\nranks_per_host = 1"}, "got 1.5"),
    "too many hosts": ({"top": "num_hosts = 99999999999\nranks_per_host = 1"}, "from 1 to 1,000,000, got 99999999999"),
    "too many ranks": (
        {"top": "num_hosts = 100000\nranks_per_host = 100"},
        "100000 hosts of 100 are more than 1,000,000 ranks",
    ),
    "nan": ({"inside": "latency_s = nan\nbandwidth = 1"}, "[inside]: Link: latency_s must be a number of seconds"),
    "a word": ({"inside": "latency_s = 0\nbandwidth = '100g'"}, "bandwidth must be a positive number of bytes per"),
    "400 digits": ({"inside": f"latency_s = 0\nbandwidth = {'9' * 400}"}, "[inside]: "),
    "a link that is a number": ({"top": f"{GOOD['top']}\nmemory = 3"}, "[memory] must be a table of bandwidth, curve"),
    "a flat curve": ({"inside": "latency_s = 0\nbandwidth = 1\ncurve = [1, 2]"}, "curve must be pairs of [message"),
    "a curve of one": ({"inside": "latency_s = 0\nbandwidth = 1\ncurve = [[1]]"}, "curve must be pairs of [message"),
    "a curve of words": ({"inside": "latency_s = 0\nbandwidth = 1\ncurve = [['a', 'b']]"}, "curve must be pairs of"),
    "a falling curve": ({"inside": "latency_s = 0\nbandwidth = 1\ncurve = [[2, 1], [1, 1]]"}, "by rising size"),
    "nic in words": ({"top": f"{GOOD['top']}\nshared_nic = 'yes'"}, "shared_nic must be true or false, got 'yes'"),
    "calibrated 1": ({"top": f"{GOOD['top']}\ncalibrated = 1"}, "calibrated must be true or false, got 1"),
    "name a number": ({"top": f"{GOOD['top']}\nname = 1"}, "name must be a text in quotes, got 1"),
    "other backend": ({"top": f"{GOOD['top']}\nbackend = 'mpi'"}, 'backend must be "gloo" or "nccl", got \'mpi\''),
    "device a word": ({"top": f"{GOOD['top']}\ndevice = 'a100'"}, "[device] must be a table of call_s, codecs, cores"),
    "device field": ({"device": "flop = 1"}, "[device]: unknown device field 'flop'; a device has call_s, "),
    "device kind": ({"device": "kind = 'tpu'"}, '[device]: Device: kind must be "cpu" or "gpu", got \'tpu\''),
    "device name": ({"device": "name = 3"}, "[device]: name must be a text in quotes, got 3"),
    "device nan": ({"device": "cores = nan"}, "[device]: Device: cores must be a positive number, got nan"),
    "codecs a word": ({"device": "codecs = 'int8'"}, "codecs must be a list of tables, each under [[device.codecs]]"),
    "codecs of words": ({"device": "codecs = ['int8']"}, "[device] codecs[0] must be a table of decode_s, encode_s"),
    "codec field": ({"device.codecs": "kin = 'x'"}, "codecs[0]: unknown codec field 'kin'"),
    "codec half": ({"device.codecs": "kind = 'x'\nencode_s = 1"}, "codecs[0]: the field 'decode_s' is missing"),
    "codec nan": (
        {"device.codecs": "kind = 'x'\nencode_s = nan\ndecode_s = 1"},
        "encode_s must be a number of seconds per byte, 0 or more, got nan",
    ),
    "codec kind": ({"device.codecs": "kind = 1\nencode_s = 1\ndecode_s = 1"}, "kind must be a compressor's name"),
    "not toml": ({"top": "import torch"}, "is not a TOML file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_no_cluster_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, sentence = HOSTILE[case]
    parts = {**GOOD, **changes}
    lines = [parts.pop("top")]
    for key, body in parts.items():
        if body:
            lines += [f"[[{key}]]" if key == "device.codecs" else f"[{key}]", body]
    path = tmp_path / "cluster.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError) as caught:
        Cluster.load(path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\.toml cannot be read \(No such file or directory\); pass "):
        Cluster.load(tmp_path / "cluster.toml")


def test_the_file_of_the_page_is_a_cluster_and_shows_every_field(tmp_path: Path) -> None:
    text = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    cluster = Cluster.load(path)
    assert (cluster.world_size, cluster.device.codecs[0].kind) == (16, "int8")
    fields = {*Link.__dataclass_fields__, *Device.__dataclass_fields__, *Cluster.__dataclass_fields__}
    assert [name for name in {*fields, *CodecSpeed._fields} if name not in text] == []
