"""docs/plan.md names every field, every recipe and every argument, and its file is its plan."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
from doc_pages import blocks, read

import gradsync as gs
from gradsync.plan.paces import KINDS
from gradsync.plan.sync_plan import _ALGORITHMS

PAGE = read("docs/plan.md")
COMPRESSORS = ("bf16", "fp16", "int8", "int4", "sign", "topk", "randomk", "powersgd")
WRAPPERS = ("error_feedback", "warmup", "across_hosts", "by_parameter", "rule", "nesterov")


def test_every_field_has_a_row_and_a_section() -> None:
    for field in fields(gs.Plan):
        assert f"| `{field.name}` |" in PAGE, field.name
        assert f"## `{field.name}`" in PAGE, field.name


@pytest.mark.parametrize("name", [*KINDS, *_ALGORITHMS, *COMPRESSORS, *WRAPPERS])
def test_every_recipe_is_shown_with_its_arguments(name: str) -> None:
    start = PAGE.index(f"`gs.{name}(")
    shown = PAGE[start : PAGE.index(")`", start)]
    for argument in inspect.signature(getattr(gs, name)).parameters.values():
        if argument.name != "inner":  # c on the page
            default = argument.default
            told = argument.name if default is argument.empty else f"{argument.name}={default!r}".replace("'", '"')
            assert told in shown, (name, told)


def test_the_file_is_the_plan_above_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(blocks("docs/plan.md", "toml")[0].text, encoding="utf-8")
    names: dict[str, gs.Plan] = {}
    exec(blocks("docs/plan.md", "python")[0].text, names)
    assert gs.Plan.load(path) == names["plan"]
