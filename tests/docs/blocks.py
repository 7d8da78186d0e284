"""The blocks of code on the pages for users: their language tags, why some are not run, and the command lines in them.

A block is tagged `sh` (a test runs it), `console` (`$ command` and what it prints; a test runs it), `sh needs=REASON` (no
test runs it, for a reason of NEEDS), `python`, or with the language of data. tests/e2e/test_shell_examples.py runs the first two.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "deploy/kubernetes/README.md"]
PAGES += [
    f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))
]  # those of design and lab are for developers
DATA = ("text", "json", "yaml")
# Reason: what a block asks for that the tests lack.
NEEDS = {
    "checkpoint": "a model or adapter of the reader's own, or one from a hub",
    "claude-code": "Anthropic's command line",
    "docker": "a Docker daemon",
    "genai-perf": "genai-perf, which tests/e2e/test_genai_perf.py runs where it is installed",
    "gpu": "an NVIDIA GPU",
    "kubernetes": "a cluster and a registry",
    "lm-eval": "lm-eval, which tests/e2e/test_lm_eval.py runs where it is installed",
    "machines": "several machines",
    "minutes": "minutes or hours",
    "network": "packages from the network, or services on other machines",
    "nginx": "a proxy that runs in front, which tests/deploy checks where nginx is installed",
    "perf-analyzer": "perf_analyzer, which tests/e2e/test_perf_analyzer.py runs where it is installed",
    "terminal": "a terminal of its own, in which it runs until Ctrl-C",
}
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OWN = re.compile(r"(?<![\w/`])\./everbatch ")
_COMMENT = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True)
class Block:
    """One block: the page, relative to the root, the number of its first line there, its tag and reason, and its text."""

    page: str
    line: int
    tag: str
    needs: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> str:
        """What a reader types: the whole text, or the lines after `$` with those that they go on in."""
        if self.tag != "console":
            return self.text
        return "".join(f"{typed}\n" for typed in re.findall(r"^\$ (.*(?:(?<=\\)\n.*)*)", self.text, re.MULTILINE))

    @property
    def own_commands(self) -> list[list[str]]:
        """The words after each `./everbatch`."""
        lines = self.commands.replace("\\\n", " ").splitlines()
        return [_words(command) for line in lines for command in _OWN.split(_COMMENT.sub("", line))[1:]]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in their order."""
    text = (ROOT / page).read_text()
    return [_block(page, text, found) for found in _BLOCK.finditer(text)]


def _block(page: str, text: str, found: re.Match[str]) -> Block:
    tag, _, rest = found[1].partition(" ")
    return Block(page, text[: found.start()].count("\n") + 2, tag, rest.removeprefix("needs="), found[2])


def _words(command: str) -> list[str]:
    """The words of one command of a line: up to what begins the next one, or ends a quoted script."""
    closed = command.rstrip("'") if command.count("'") % 2 else command
    lexer = shlex.shlex(closed, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set(";&|"):
            break
        words.append(word)
    return words


ALL = [block for page in PAGES for block in blocks(page)]
