"""The options of `bench served`, checked in one place before anything is started."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.harness.answers import Limits
from benchmarks.harness.measure import Effort
from benchmarks.harness.work import Cell
from deploy.errors import UserError

PEERS = ("vllm", "llamacpp", "openvino")
WIRES = ("openai", "http", "grpc")
INSTALLED = (*PEERS, "aiperf")
DRIVERS = ("auto", "aiperf", "python")
OURS = "everbatch"
PAIRS = "512:512,8192:512,1024:1024,2048:256,256:2048"
MOST_USERS, MOST_LEVELS, MOST_PAIRS, MOST_TOKENS = 256, 8, 16, 131_072
MOST_SECOND_LEVEL = 65_536  # MiB
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}\Z")


@dataclass(frozen=True)
class Plan:
    """The options of a run, checked. `urls`: peers that run already, by name.

    `second_level`: MiB for KV outside of the cache, 0: none.
    """

    model: str
    peers: tuple[str, ...]
    urls: dict[str, str]
    wires: tuple[str, ...]
    single: tuple[Cell, ...]
    turns: tuple[Cell, ...]
    left_out: tuple[str, ...]
    effort: Effort
    driver: str
    second_level: int
    out: Path


@dataclass(frozen=True)
class Raw:
    """The options as they were given."""

    model: str
    peers: str
    wires: str
    scale: float
    users: str
    pairs: str
    seconds: float
    requests: int
    repeats: int
    conversations: int
    turns: int
    first_token_limit_ms: float
    inter_token_limit_ms: float
    driver: str
    second_level: int
    out: Path


def checked(raw: Raw, most_tokens: int) -> Plan:
    """`most_tokens`: the longest sequence that the model takes. Raises UserError, and makes the directory of results."""
    in_range("--scale", raw.scale, 0.001, 4)
    in_range("--seconds", raw.seconds, 1, 3600)
    in_range("--requests", raw.requests, 1, 100)
    in_range("--repeats", raw.repeats, 1, 20)
    in_range("--turns", raw.turns, 2, 32)
    in_range("--first-token-limit-ms", raw.first_token_limit_ms, 1, 3_600_000)
    in_range("--inter-token-limit-ms", raw.inter_token_limit_ms, 0.1, 3_600_000)
    in_range("--second-level", raw.second_level, 0, MOST_SECOND_LEVEL)
    if raw.conversations:
        in_range("--conversations", raw.conversations, 2, 1024)
    one_of("--driver", raw.driver, DRIVERS)
    users = user_levels(raw.users)
    lengths = scaled(length_pairs(raw.pairs), raw.scale)
    peers, urls = named_peers(raw.peers)
    cells = [Cell(prompt, new, level) for prompt, new in lengths for level in users]
    turns = [of_conversations(raw, lengths[0], level) for level in users if 4 * level <= raw.conversations]
    fitting = [cell for cell in (*cells, *turns) if cell.longest <= most_tokens]
    if not fitting:
        least = min(cell.longest for cell in cells)
        raise UserError(
            f"the shortest cell has {least:,} tokens a sequence, the model takes {most_tokens:,}; "
            f"give a smaller --scale or other --pairs"
        )
    left_out = [
        f"{cell.name}: {cell.longest:,} tokens, the model takes {most_tokens:,}"
        for cell in (*cells, *turns)
        if cell not in fitting
    ]
    return Plan(
        model=raw.model,
        peers=peers,
        urls=urls,
        wires=tuple(dict.fromkeys(one_of("--wires", wire, WIRES) for wire in listed(raw.wires))) or ("openai",),
        single=tuple(cell for cell in fitting if not cell.conversations),
        turns=tuple(cell for cell in fitting if cell.conversations),
        left_out=tuple(left_out),
        effort=Effort(
            raw.repeats, raw.requests, raw.seconds, Limits(raw.first_token_limit_ms, raw.inter_token_limit_ms)
        ),
        driver=raw.driver,
        second_level=raw.second_level,
        out=writable(raw.out),
    )


def in_range(option: str, value: float, least: float, most: float) -> None:
    """Raise UserError for a number outside, and for what is no number."""
    if not math.isfinite(value) or not least <= value <= most:
        raise UserError(f"{option} is {value:g}, allowed is {least:g} to {most:g}")


def one_of(option: str, name: str, known: tuple[str, ...]) -> str:
    """The name. Raises UserError for another one."""
    if name not in known:
        raise UserError(f"{option} has {name[:40]!r}; choose from {', '.join(known)}")
    return name


def listed(text: str) -> list[str]:
    """The parts between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole(text: str, most: int) -> int | None:
    """A whole number from 1 to `most`, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most else None


def user_levels(text: str) -> list[int]:
    """`1,4,16` in order, each once. Raises UserError."""
    levels = [whole(part, MOST_USERS) for part in listed(text)]
    found = sorted({level for level in levels if level is not None})
    if not found or None in levels or len(found) > MOST_LEVELS:
        raise UserError(
            f"--users is {text[:60]!r}; give 1 to {MOST_LEVELS} numbers from 1 to {MOST_USERS}, such as 1,4,16"
        )
    return found


def length_pairs(text: str) -> list[tuple[int, int]]:
    """`512:512,2048:256` as tokens of prompt and answer. Raises UserError."""
    pairs = []
    for part in listed(text):
        prompt, _, new = part.partition(":")
        lengths = whole(prompt, MOST_TOKENS), whole(new, MOST_TOKENS)
        pairs.append(lengths)
    found = [(prompt, new) for prompt, new in pairs if prompt and new]
    if not found or len(found) != len(pairs) or len(found) > MOST_PAIRS:
        raise UserError(
            f"--pairs is {text[:60]!r}; give 1 to {MOST_PAIRS} pairs PROMPT:ANSWER of 1 to {MOST_TOKENS} tokens, such as {PAIRS}"
        )
    return found


def scaled(pairs: list[tuple[int, int]], scale: float) -> list[tuple[int, int]]:
    """Each length times `scale`: a prompt keeps at least one token, an answer two, between which there is time."""
    return list(dict.fromkeys((max(1, round(prompt * scale)), max(2, round(new * scale))) for prompt, new in pairs))


def of_conversations(raw: Raw, pair: tuple[int, int], users: int) -> Cell:
    """The cell with conversations: a turn has the first pair's prompt, and all turns of a conversation share its answer."""
    prompt, new = pair
    return Cell(prompt, max(2, new // raw.turns), users, raw.conversations, raw.turns)


def named_peers(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of peers that are started here, and the addresses of `NAME=URL`. Raises UserError."""
    names: list[str] = []
    urls: dict[str, str] = {}
    for part in listed(text):
        name, equals, url = part.partition("=")
        if not equals:
            names.append(one_of("--peers", name, PEERS))
        elif not _NAME.match(name) or name in (*PEERS, OURS) or name in urls:
            raise UserError(
                f"--peers has {part[:60]!r}; NAME of NAME=URL is a word in small letters that is not used yet"
            )
        else:
            urls[name] = server_url(part, url)
    return tuple(dict.fromkeys(names)), urls


def server_url(part: str, url: str) -> str:
    """`http://HOST:PORT` without a slash at its end. Raises UserError."""
    try:
        split = urlsplit(url)
        fits = split.scheme == "http" and bool(split.hostname) and bool(split.port) and split.path in ("", "/")
    except ValueError:  # the port is no number, or too large
        fits = False
    if not fits or split.query or split.fragment or split.username:
        raise UserError(f"--peers has {part[:60]!r}; URL is http://HOST:PORT of a server with OpenAI's /v1/completions")
    return url.rstrip("/")


def writable(directory: Path) -> Path:
    """The directory, made if it is not there. Raises UserError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"--out {directory} cannot be written to ({error.strerror}); choose another directory"
        ) from None
    return directory
