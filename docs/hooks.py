"""What mkdocs asks while it builds the site: files from outside of docs/, and the page of all commands.

Pages link to benchmarks, examples and sources as they lie in the repository, so that the links hold wherever the
repository is read. Whatever is linked to becomes part of the site, at the same path: a README as a page, a source file
as a page that shows it, everything else as it is.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from gradsync.cli import main

_LOG = get_plugin_logger("docs/hooks.py")
_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_COMMANDS = "reference/commands.md"
_WIDTH = "100"
_SHOWN = {".py": "python", ".sh": "sh", ".sbatch": "sh"}  # on a page of their own


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of commands, then everything that pages link to, and what those link to."""
    files.append(File.generated(config, _COMMANDS, content=_commands()))
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while waiting:
        path, text = waiting.pop()
        for target in _outside(path, text):
            if files.get_file_from_path(_on_site(target)) is None:
                files.append(_neighbour(target, config))
                if target.endswith(".md"):
                    waiting.append((target, (_ROOT / target).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where things are on the site; one to a folder of the repository becomes its text."""
    path = _in_repository(page.file)

    def lead(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        whole = _resolved(path, target)
        if not (_ROOT / whole).is_file():
            if whole.startswith("docs/"):
                return link[0]  # mkdocs looks after these
            if not (_ROOT / whole).is_dir():
                _LOG.warning(f"{path} leads to {target}, and the repository has no {whole}")
            return text
        there = posixpath.relpath(_on_site(whole), posixpath.dirname(page.file.src_uri))
        return f"{picture}[{text}]({there}{anchor or ''})"

    return _LINK.sub(lead, markdown)


def _outside(path: str, text: str) -> Iterator[str]:
    """Files of the repository, outside of docs/, to which a page leads."""
    for link in _LINK.finditer(text):
        target = _resolved(path, link[3])
        if not target.startswith(("docs/", "..")) and (_ROOT / target).is_file():
            yield target


def _neighbour(target: str, config: MkDocsConfig) -> File:
    if language := _SHOWN.get(Path(target).suffix):
        text = (_ROOT / target).read_text(encoding="utf-8")
        shown = f"---\nhide: [navigation, toc]\n---\n\n# {target}\n\n~~~~{language}\n{text}\n~~~~\n"
        return File.generated(config, _on_site(target), content=shown)
    return File.generated(config, target, abs_src_path=str(_ROOT / target))


def _resolved(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _on_site(path: str) -> str:
    return f"{path}.md" if Path(path).suffix in _SHOWN else path.removeprefix("docs/")


def _in_repository(file: File) -> str:
    return f"docs/{file.src_uri}" if file.generated_by is None else file.src_uri


def _commands() -> str:
    """What every command says of itself, asked of the commands, so that it is what they say."""
    told = ["# Commands", "What `--help` says of each. Exit codes: 0 done, 1 the run itself failed, 2 bad input."]
    for words in ([], *([name] for name in main._COMMANDS)):
        told.append(f"## {' '.join(['gradsync', *words])}")
        told.append(f"```text\n{_help(words)}\n```")
    return "\n\n".join(told) + "\n"


def _help(words: list[str]) -> str:
    said = StringIO()
    with patch.dict(os.environ, COLUMNS=_WIDTH), redirect_stdout(said), suppress(SystemExit):
        main.main([*words, "--help"])
    return said.getvalue().rstrip()
