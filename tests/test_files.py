"""A file is the old one or the new one to whoever reads it, and what is no file is left as it is."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gradsync import files


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Two ranks that save the same cluster.toml: one read it while the other was writing."""
    path, texts = tmp_path / "cluster.toml", ("a" * 100_000, "b" * 70_000)
    files.write(path, texts[0])
    over = threading.Event()

    def write() -> None:
        for number in range(200):
            files.write(path, texts[number % 2])
        over.set()

    writers = [threading.Thread(target=write) for _ in range(2)]
    for each in writers:
        each.start()
    seen = set[str]()
    while not over.is_set():
        seen.add(files.read(path).decode())
    for each in writers:
        each.join()
    assert seen <= set(texts)
    assert os.listdir(tmp_path) == ["cluster.toml"]


def test_what_a_file_was_it_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.toml", tmp_path / "link.toml"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write(link, "new")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    files.write(tmp_path / "fresh.toml", "x")
    mask = files._umask()
    assert (tmp_path / "fresh.toml").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_disk_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.toml"]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"directory|folder"):
        files.write(tmp_path, "text")
