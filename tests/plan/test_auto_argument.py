"""What `auto` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradsync as gs


def test_a_cluster_file_that_is_not_there_is_named_with_who_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml cannot be read \(No such file.*\); gradsync probe writes one"):
        gs.auto(cluster=tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match="cannot be read"):
        gs.auto(cluster=tmp_path)
