"""Blocks that are no programs: files load, output is output, and no code hides from the tests."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from doc_pages import Block, all_blocks

import gradsync as gs

LANGUAGES = {"python", "diff", "sh", "console", "toml", "yaml", "text", ""}
PROGRAM = re.compile(
    r"(\$ |\(?([A-Z_]+=\S+ )*(gradsync|torchrun|srun|mpirun|pip|make|python3?|tensorboard|curl|ssh|export) )"
)


@pytest.mark.parametrize("block", all_blocks("toml"), ids=lambda block: block.where)
def test_a_toml_file_loads_as_what_it_is(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text(block.text, encoding="utf-8")
    if "inside" in tomllib.loads(block.text):
        gs.Cluster.load(path)
    else:
        gs.Plan.load(path)


def test_every_block_has_a_fence_and_a_language_that_is_tested() -> None:
    wrong = [block.where for block in all_blocks() if block.language not in LANGUAGES]
    assert wrong == []


def test_no_code_hides_in_a_block_of_output() -> None:
    hidden = [block.where for block in all_blocks("", "text") if PROGRAM.match(block.text) or _is_python(block.text)]
    assert hidden == []


def _is_python(text: str) -> bool:
    """Not every word that parses: a program imports, assigns, calls or defines something."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    told = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef, ast.With, ast.For)
    return any(isinstance(node, told) or (isinstance(node, ast.Expr) and _calls(node.value)) for node in body)


def _calls(node: ast.expr) -> bool:
    return isinstance(node, ast.Call)
