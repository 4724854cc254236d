"""SLURM's lists of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.launch.nodelist import expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,07]-ib,login1", ["node01-ib", "node02-ib", "node03-ib", "node07-ib", "login1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("gpu-a[3].cluster", ["gpu-a3.cluster"]),
    ],
)
def test_node_list_is_written_out(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a,,b", "n[1", "n1]", "n[]", "n[1-]", "n[3-1]", "n[a-b]", "a b", "n[[1]]"]
)
def test_damaged_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"node list|set of numbers|backwards"):
        list(expand_hosts(text))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z-]{0,4}", fullmatch=True),
            st.lists(st.tuples(st.integers(0, 120), st.integers(0, 4)), min_size=1, max_size=3),
            st.integers(1, 4),
            st.sampled_from(["", "-ib", ".x"]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_node_list_round_trips(groups: list[tuple[str, list[tuple[int, int]], int, str]]) -> None:
    texts, hosts = [], []
    for head, spans, width, tail in groups:
        texts.append(f"{head}[{','.join(f'{a:0{width}}-{a + n:0{width}}' for a, n in spans)}]{tail}")
        for first, more in spans:
            digits = len(f"{first:0{width}}")
            hosts += [f"{head}{number:0{digits}}{tail}" for number in range(first, first + more + 1)]
    assert list(expand_hosts(",".join(texts))) == hosts
