"""Finds sentences that a stranger cannot read alone: `python -m tests.tooling.prose [PATH...]` lists them.

It reads docstrings, comments and the pages of docs/. What it looks for are the forms that made readers stop (CONTRIBUTING.md,
rule 4): a text that opens with the second half of a sentence, and words whose meaning hangs on another text.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOTS = ("backend", "client", "compat", "deploy", "docs", "gateway", "kernels", "model_repository", "tools")
PAGES = ("README.md", "CONTRIBUTING.md", "backend/README.md")
OPENINGS = re.compile(r"^(Of|Those|What|Whether|Who|Whom|Whose)\b(?!.*\?)")  # a question may open so
WORDS = re.compile(
    r"\b(?:is|are|was|were|be|been) told\b|\bof (?:them|these|those) that\b|\b[Nn]obody\b|\b[Ll]ikewise\b|\bwhoever\b"
    r"|\btells? (?:of|whether)\b"
)
_COMMENTS_FOR_TOOLS = ("noqa", "type:", "fmt:", "pragma", "mypy:", "!", "---")


class Hit(NamedTuple):
    path: Path  # relative to the root
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def hits(*paths: Path) -> list[Hit]:
    return [hit for path in paths for hit in (_in_page(path) if path.suffix == ".md" else _in_module(path))]


def sources() -> list[Path]:
    """All files that are read, relative to the root."""
    found = [path for root in ROOTS for path in (ROOT / root).rglob("*") if path.suffix in (".py", ".md")]
    return sorted({path.relative_to(ROOT) for path in found} | {Path(page) for page in PAGES})


def _in_module(path: Path) -> Iterator[Hit]:
    text = (ROOT / path).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=True)
            if docstring is not None:
                yield from _in_text(path, node.body[0].lineno, docstring)
    for line, comment in _comments(text):
        yield from _in_text(path, line, comment)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment; comments on lines of their own that follow each other are one."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string.lstrip("#").strip()
        is_alone = token.line.lstrip().startswith("#")
        if block and not (is_alone and token.start[0] == last + 1):
            yield first, " ".join(block)
            block = []
        if comment.startswith(_COMMENTS_FOR_TOOLS) or not comment:
            continue
        if not is_alone:
            yield token.start[0], comment
            continue
        first = token.start[0] if not block else first
        last = token.start[0]
        block.append(comment)
    if block:
        yield first, " ".join(block)


def _in_page(path: Path) -> Iterator[Hit]:
    is_code = False
    for line, text in enumerate((ROOT / path).read_text().splitlines(), 1):
        if text.startswith("```"):
            is_code = not is_code
        elif not is_code:
            for cell in text.split("|") if text.startswith("|") else [text]:
                yield from _in_words(path, line, cell.strip())


def _in_text(path: Path, line: int, text: str) -> Iterator[Hit]:
    first = text.split("\n", 1)[0]
    if OPENINGS.match(first[:1].upper() + first[1:]):
        yield Hit(path, line, first)
    for number, each in enumerate(text.splitlines()):
        yield from _in_words(path, line + number, each)


def _in_words(path: Path, line: int, text: str) -> Iterator[Hit]:
    if WORDS.search(text):
        yield Hit(path, line, text.strip())


def main() -> None:
    given = [Path(each) for each in sys.argv[1:]]
    chosen = [path for path in sources() if not given or any(path.is_relative_to(each) for each in given)]
    found = hits(*chosen)
    print(*found, sep="\n")
    print(f"{len(found)} sentences in {len(chosen)} files")


if __name__ == "__main__":
    main()
