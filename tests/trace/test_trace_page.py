"""docs/trace.md names every field of every line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args

from gradsync.trace.lines import BucketPlan, BucketTimes, Line, SocketLine

PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()


def test_every_kind_and_field_is_on_the_page() -> None:
    for kind in get_args(Line):
        assert f"`{kind.kind}`" in PAGE
        for field in fields(kind):
            assert f"`{field.name}`" in PAGE, (kind.kind, field.name)
    for row in (BucketPlan, BucketTimes, SocketLine):
        for name in row._fields:
            assert f"`{name.removeprefix('wait_')}`" in PAGE, (row, name)
