"""Finds the messages that an operator or a client may see, and the rows of docs/troubleshooting.md that they belong to.

A message of a failure (`BY_TEXT`, and each warning or error that is logged) needs a row that quotes its text. A refusal names
value, limit and remedy itself; it needs a family of the page, which stands for kinds of errors of some files (`FAMILIES`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tests.architecture.sources import PRODUCT, nodes, parsed, python_files
from tests.docs.messages import GAP

# Errors and functions that make them: each text has a row of its own, or is one of several in a row.
BY_TEXT = (
    "ControlFailed",
    "ConnectionLost",
    "EngineUnavailable",
    "KeysError",
    "NativeUnavailable",
    "Overloaded",
    "ServerFailed",
    "SessionError",
    "SetupError",
    "Unavailable",
    "UserError",
    "overloaded",
    "too_many_of_one",
    "unavailable",
)
_CONFIG, _INVALID = ("ConfigError",), ("InvalidRequest", "NotFound")
_NOT_SERVED = ("Unsupported", "unsupported", "UnknownParameter", "RefusedParameter", "NotHere")
# Name of a family on the page -> the kinds of errors in it, and the beginnings of the paths where they are made.
FAMILIES: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "A GGUF file": [(_CONFIG, ("backend/api/checkpoint/gguf", "backend/text/gguf", "backend/models/gguf"))],
    "An adapter": [
        (
            _CONFIG,
            (
                "backend/api/checkpoint/adapter",
                "backend/api/checkpoint/prompt_adapter",
                "backend/executor/prompt_adapters",
                "backend/engine/prefetch",
            ),
        )
    ],
    "Files of a checkpoint": [
        (
            _CONFIG,
            tuple(f"backend/api/checkpoint/{name}" for name in ("model_files", "weight_files", "pooling", "quantised")),
        ),
        (_CONFIG, ("backend/models/", "backend/quant/", "backend/hosted/")),
    ],
    "An architecture": [
        (_CONFIG, ("backend/architectures/",)),
        (_NOT_SERVED, ("backend/architectures/", "backend/models/", "backend/api/checkpoint/quantised")),
    ],
    "A tokenizer or chat template": [(_CONFIG, ("backend/text/", "deploy/"))],
    "A conversion": [(_CONFIG, ("backend/convert/",))],
    "A setting": [
        (
            _CONFIG,
            (
                "backend/api/",
                "backend/core/",
                "backend/storage/",
                "backend/engine/",
                "backend/executor/",
                "backend/guided/",
                "backend/kvcache/",
            ),
        ),
        (_CONFIG, ("backend/images/", "backend/replicas/", "backend/serving/", "backend/wire/", "backend/worker/")),
        (_NOT_SERVED, ("backend/api/", "backend/executor/", "backend/worker/")),
    ],
    "A field of a request": [(_INVALID, ("backend/",))],
    "A field that is not served": [
        (_NOT_SERVED, ("backend/images/", "backend/serving/", "backend/text/", "backend/engine/", "compat/trtllm/"))
    ],
    "A guide": [(("GuideError", "InvalidGuide"), ("backend/",))],
    "An argument in Python": [
        ((*_CONFIG, *_INVALID, *_NOT_SERVED, "ParameterError"), ("compat/",)),
        (("InvalidArgument",), ("client/",)),
    ],
    "A body at the OpenAI endpoint": [(("GatewayError",), ("gateway/",))],
}
OF_REFUSALS = frozenset(name for parts in FAMILIES.values() for names, _ in parts for name in names)
# Exceptions of the project that nobody outside it sees, and why.
INTERNAL = {
    "BackgroundError": "carries an error of the loop to a caller of the LLM API, with its text",
    "BatchError": "carries the errors of several requests, with their texts",
    "Cancelled": "a request that its client has ended",
    "ClientError": "the base of the client's errors",
    "Damaged": "becomes a warning that quotes it",
    "DamagedWeights": "becomes a warning that quotes it",
    "DatabaseError": "becomes `gateway: --batches ...`, with its text",
    "DeadlineExceeded": "its text is made with the client's other messages, which have rows",
    "EngineFault": "becomes `the engine failed on request ...`",
    "EverbatchError": "the base of the project's errors",
    "FrameTooLarge": "becomes `client ...: a frame of ... bytes was dropped`, or an INVALID_ARGUMENT with its text",
    "IllegalTransition": "a defect, found by tests",
    "LostRank": "becomes `rank ... has ended`",
    "NotACall": "a text that is no call of a tool stays a text",
    "NotTraced": "becomes a line of the launcher that has a row",
    "_NotAllowed": "becomes `the image at ...` of a 400",
    "OutOfBlocks": "a defect, found by tests",
    "OutOfRange": "becomes the TypeError that TensorRT-LLM's bindings raise",
    "ProbeFailed": "becomes `the server is up but does not generate: ...`",
    "ReaderTooSlow": "becomes `client ... does not read its responses; it is cut off`",
    "Refused": "a connection that is no HTTP is closed",
    "RequestError": "carries the error of a request to a caller of the LLM API, with its text",
    "ResultTimeout": "a TimeoutError in a program, without a text",
    "RowFailure": "becomes the error of one request, with its text",
    "ServerLost": "becomes the 503 `the server has ended ... times while this request ran; ...`",
    "StartCancelled": "Ctrl-C while the server starts",
    "UrlFault": "becomes `the image at ...` of a 400, with its text",
    "Unauthenticated": "its text is made with the client's other messages, which have rows",
    "Undecodable": "becomes `client ...: a command of ... bytes cannot be read: ...`",
    "Unfinished": "a vector whose tokens are still computed",
    "UnknownCell": "a defect, found by tests",
    "Unreachable": "its text is made with the client's other messages, which have rows",
    "WorkerFailure": "ends the engine, whose end has rows",
    "WorkersLost": "ends the engine, whose end has rows",
}
_TO_CONSOLE = ("warning: ", "everbatch: ")
_LOGGED = ("warning", "error", "critical")
_FORMAT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*[\d.]*[sdfrgix]")
_LEAST = 8  # characters: a shorter text is a name, or comes from elsewhere


@dataclass(frozen=True)
class Message:
    """One text with gaps that the sources make: the file, relative to the root, its line, and the error that has it."""

    path: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text.replace(GAP, '...')}"


def messages(tree: ast.Module, path: str) -> Iterator[Message]:
    """What a module of the project may say."""
    inner = {id(part) for node in nodes(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and node.args:
            kind, texts = _kind_of(node), _first_text(node)
            for text in texts if kind is not None else ():
                yield Message(path, node.lineno, str(kind), text)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inner:
            for text in _texts(node):
                if text.startswith(_TO_CONSOLE) and _has_words(text.partition(": ")[2]):
                    yield Message(path, node.lineno, "console", text.rstrip("\n"))


def all_messages() -> list[Message]:
    return [message for path in python_files(*PRODUCT) for message in messages(parsed(path), str(path))]


def needs_a_row(message: Message) -> bool:
    return message.kind in (*BY_TEXT, "log", "console")


def family(message: Message) -> str | None:
    """The family on the page that a refusal belongs to."""
    for name, parts in FAMILIES.items():
        if any(message.kind in kinds and message.path.startswith(places) for kinds, places in parts):
            return name
    return None


def is_quoted(text: str, rows: list[str]) -> bool:
    """True if one of the page's quotations, in which `...` stands for anything, is this text. One without words is none."""
    rows = [row for row in rows if _has_words(row.replace("...", GAP))]
    return any(re.fullmatch(".*".join(map(re.escape, row.split("..."))), text, re.DOTALL) for row in rows)


def exceptions() -> dict[str, str]:
    """Each class of exceptions that the project defines -> its file."""
    found: dict[str, str] = {}
    for path in python_files(*PRODUCT):
        for node in nodes(parsed(path)):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.ClassDef) and any(
                re.search(r"(?<!Base)(Error|Exception|InvalidRequest|Unsupported)$", base) for base in bases
            ):
                found[node.name] = str(path)
    return found


def _kind_of(call: ast.Call) -> str | None:
    """The error that a call makes, `log` where it logs what goes wrong, or None."""
    name = (
        call.func.id
        if isinstance(call.func, ast.Name)
        else call.func.attr
        if isinstance(call.func, ast.Attribute)
        else ""
    )
    if name in _LOGGED:
        return (
            "log"
            if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("log", "_log", "logger")
            else None
        )
    if name == "GatewayError" and isinstance(call.args[0], ast.Constant) and call.args[0].value in (408, 500, 503):
        return "unavailable"
    return name if name in (*BY_TEXT, *OF_REFUSALS) else None


def _first_text(call: ast.Call) -> list[str]:
    """The first argument that is a text: in all its forms, where it has several."""
    for argument in call.args:
        if texts := [text for each in _texts(argument) if _has_words(text := _FORMAT.sub(GAP, each))]:
            return texts
    return []


def _has_words(text: str) -> bool:
    return len(text.replace(GAP, "").strip()) >= _LEAST


def _texts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return ["".join(pair) for pair in product(_texts(node.left) or [GAP], _texts(node.right) or [GAP])]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return []
