"""What is written as TOML reads back as the same, and a wrong field is named."""

from __future__ import annotations

import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradsync import tables

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
lists = st.recursive(st.lists(plain, max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=6)
nested = st.recursive(
    st.dictionaries(texts, plain | lists, max_size=4),
    lambda inner: st.dictionaries(texts, plain | lists | inner | st.lists(inner, min_size=1, max_size=3), max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(table=nested)
def test_a_table_is_the_same_after_a_file(table: dict[str, Any], tmp_path: Path) -> None:
    tables.write(tmp_path / "t.toml", "what it is", table)
    assert tables.read(tmp_path / "t.toml") == table


def test_nan_is_written_as_nan() -> None:
    assert math.isnan(tomllib.loads("\n".join(tables.toml_lines({"x": math.nan})))["x"])


def test_half_a_letter_is_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds half a letter"):
        tables.write(tmp_path / "t.toml", "what it is", {"name": "\ud800"})
    assert not (tmp_path / "t.toml").exists()


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match="TOML has no word for None"):
        tables.toml_lines({"x": None})


@pytest.mark.parametrize("content", [b"import torch", b"a = " + b"[" * 100_000, b"\xff\x00", b"a = " + b"9" * 5000])
def test_a_file_that_is_no_toml_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.toml is not a TOML file"):
        tables.read(tmp_path / "t.toml")


def test_a_file_that_cannot_be_read_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "closed").write_text("")
    (tmp_path / "closed").chmod(0)
    refused: list[tuple[str, type[OSError], str]] = [
        ("nope.toml", FileNotFoundError, "No such file or directory"),
        ("closed/nope.toml", NotADirectoryError, "Not a directory"),
        ("folder", OSError, "it is a folder, not a regular file"),
        ("pipe", OSError, "it is a pipe (FIFO), not a regular file"),
    ]
    if not os.access(tmp_path / "closed", os.R_OK):
        refused.append(("closed", PermissionError, "Permission denied"))
    for name, kind, why in refused:
        path = tmp_path / name
        with pytest.raises(OSError) as caught:
            tables.read(path)
        assert type(caught.value) is kind
        assert str(caught.value) == f"{path} cannot be read ({why}); pass the path of a TOML file that save() wrote"
        assert caught.value.strerror == why


def test_a_wrong_field_is_told_the_near_one() -> None:
    with pytest.raises(ValueError) as caught:
        tables.check_fields("c.toml: [inside]", "link", {"bandwith": 1}, ["latency_s", "bandwidth"])
    assert str(caught.value) == (
        "c.toml: [inside]: unknown link field 'bandwith'; a link has bandwidth, latency_s; did you mean 'bandwidth'?"
    )


def test_a_missing_field_is_told_what_is_needed() -> None:
    with pytest.raises(ValueError, match="the field 'b' is missing; a thing needs a and b"):
        tables.check_fields("c.toml", "thing", {"a": 1}, ["a", "b"], ["a", "b"])


@pytest.mark.parametrize("value", [3, "x", [1], None])
def test_what_is_no_table_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"c\.toml: \[inside\] must be a table of a, b, got"):
        tables.check_fields("c.toml: [inside]", "thing", value, ["a", "b"])


def test_true_is_no_number_in_a_file() -> None:
    tables.check_kind("c.toml", {"x": 1.5}, "x", (int, float), "a number")
    tables.check_kind("c.toml", {}, "x", (int, float), "a number")
    with pytest.raises(ValueError, match=r"c\.toml: x must be a number, got True"):
        tables.check_kind("c.toml", {"x": True}, "x", (int, float), "a number")


def test_a_long_value_is_cut_in_the_sentence() -> None:
    with pytest.raises(ValueError) as caught:
        tables.check_kind("c.toml", {"x": "y" * 10_000}, "x", int, "a number")
    assert len(str(caught.value)) < 200
