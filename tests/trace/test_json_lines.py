"""Lines survive their way to JSON and back, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.trace.json_lines import Unreadable, from_json, to_json
from gradsync.trace.lines import (  # fmt: skip
    BucketLayout,
    BucketPlan,
    BucketTimes,
    ClockShift,
    Error,
    Health,
    Line,
    PlanChoice,
    RankEnd,
    RunHeader,
    SocketLine,
    SocketLines,
    Stats,
    StepLine,
    StepPart,
)

TIME = st.integers(0, 10**12).map(lambda number: number / 1e6)
TEXT = st.text(max_size=20)
NUMBER = st.integers(0, 2**40)
BUCKET = st.builds(BucketTimes, NUMBER, *[st.none() | TIME] * 6, NUMBER, TIME, TIME)
STEP = st.builds(
    StepLine,
    step=NUMBER,
    at=TIME,
    step_s=TIME,
    phases=st.lists(st.builds(StepPart, st.sampled_from(["input", "forward", "wait"]), TIME, TIME), max_size=4),
    exposed_s=TIME,
    nbytes=NUMBER,
    raw_nbytes=NUMBER,
    encode_s=TIME,
    decode_s=TIME,
    counts=st.booleans(),
    held_up_by=st.none() | TEXT,
    exact_input=st.booleans(),
    buckets=st.none() | st.lists(BUCKET, max_size=3),
    gradients=st.none() | st.lists(st.tuples(NUMBER, TIME), max_size=3),
    header=st.none() | st.tuples(TIME, TIME),
)
LINE = st.one_of(
    STEP,
    st.builds(ClockShift, NUMBER, TIME, TIME),
    st.builds(RankEnd, NUMBER, TEXT),
    st.builds(Health, NUMBER, TEXT, st.lists(NUMBER, max_size=3), st.none() | TEXT, st.none() | NUMBER, TEXT),
    st.builds(Error, NUMBER, TEXT, st.lists(NUMBER, max_size=3), st.none() | NUMBER, TEXT),
    st.builds(PlanChoice, NUMBER, st.just({"combine": "mean"}), TIME, st.none() | TIME),
    st.builds(Stats, NUMBER, st.dictionaries(TEXT, st.none() | NUMBER | TIME | TEXT, max_size=3)),
    st.builds(
        SocketLines, NUMBER, st.lists(st.builds(SocketLine, st.none() | NUMBER, TEXT, NUMBER, TIME, TIME, NUMBER))
    ),
    st.builds(
        BucketLayout, NUMBER, st.lists(st.builds(BucketPlan, NUMBER, st.lists(NUMBER), NUMBER, st.none() | TEXT))
    ),
)


@given(LINE)
def test_a_line_comes_back_as_it_was(line: Line) -> None:
    text = to_json(line)
    assert "\n" not in text
    assert from_json(text) == line
    assert json.loads(text)["kind"] == line.kind


def test_a_header_comes_back_as_it_was() -> None:
    run = RunHeader(
        1, 2, "a", 7, 1.5, 2.5, "ddp", "cpu", {"combine": "mean"}, [("w\x1b\n", (2, 3), "float32")], "1", "2"
    )
    assert from_json(to_json(run)) == run


def test_what_is_no_number_is_nothing() -> None:
    told = from_json(to_json(Stats(3, {"loss": float("nan"), "most": float("inf")})))
    assert told == Stats(3, {"loss": None, "most": None})


GOOD = json.loads(
    to_json(StepLine(1, 0.0, 1.0, [StepPart("wait", 0.0, 1.0)], buckets=[BucketTimes(0, *[0.0] * 6, 1, 0, 0)]))
)


@pytest.mark.parametrize(
    "row",
    [
        "", "null", "[1]", "{}", '{"kind": []}', '{"kind":"step"}', "[" * 100_000,
        '{"kind":"end","step":"7","why":"x"}',
        '{"kind":"run","format":1}', '{"kind":"clock","step":1e400,"offset_s":0,"error_s":0}',
        *[json.dumps(GOOD | {key: value}) for key in GOOD if key != "kind" for value in ("x", [[]], {"a": 1})
          if key != "counts"],
    ],
)  # fmt: skip
def test_anything_else_is_refused(row: str) -> None:
    with pytest.raises(Unreadable):
        from_json(row)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
        lambda it: st.lists(it) | st.dictionaries(TEXT, it),
        max_leaves=9,
    ),
    st.sampled_from(sorted(GOOD)),
)
def test_no_value_does_more_than_be_refused(value: Any, key: str) -> None:
    with contextlib.suppress(Unreadable):
        from_json(json.dumps(GOOD | {key: value}))
