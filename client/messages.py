"""A generation request and its answer as plain values, and their form on the wire (KServe v2 tensors).

Text models take rank-2 tensors [1, 1] ([1, n] for word lists). What is None is not sent: the server's default holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# wire name -> (datatype, attribute of GenerateRequest)
INPUTS: dict[str, tuple[str, str]] = {
    "text_input": ("BYTES", "prompt"),
    "max_tokens": ("INT32", "max_tokens"),
    "stream": ("BOOL", "stream"),
    "temperature": ("FP32", "temperature"),
    "top_k": ("INT32", "top_k"),
    "top_p": ("FP32", "top_p"),
    "repetition_penalty": ("FP32", "repetition_penalty"),
    "presence_penalty": ("FP32", "presence_penalty"),
    "frequency_penalty": ("FP32", "frequency_penalty"),
    "seed": ("UINT64", "seed"),
    "min_tokens": ("INT32", "min_tokens"),
    "end_id": ("INT32", "end_id"),
    "stop_words": ("BYTES", "stop_words"),
    "bad_words": ("BYTES", "bad_words"),
    "exclude_input_in_output": ("BOOL", "exclude_input"),
    "return_log_probs": ("BOOL", "return_log_probs"),
}
MAX_NAMESPACE = 256  # The server allows so many characters.
FP32_MAX = (2 - 2**-23) * 2.0**127
RANGES: dict[str, tuple[float, float]] = {
    "INT32": (-(2**31), 2**31 - 1),
    "UINT64": (0, 2**64 - 1),
    "FP32": (-FP32_MAX, FP32_MAX),  # JSON has no infinity and no NaN.
}


def check_namespace(namespace: str) -> None:
    """Raise ValueError for a namespace that the server would refuse or that cannot be sent."""
    if len(namespace) > MAX_NAMESPACE:
        raise ValueError(
            f"namespace has {len(namespace)} characters, the limit is {MAX_NAMESPACE}; send a hash of it, for example"
        )
    # The server sees a C string: what follows would be lost, and strangers would share a namespace.
    if "\0" in namespace:
        raise ValueError("namespace holds a zero character, which ends a text for the server; leave it out")
    check_text("namespace", namespace)


def check_api_key(api_key: str) -> None:
    """Raise ValueError for a key that no header can carry. The message does not hold the key."""
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ValueError("the API key holds a space or a character that is not printable ASCII; send the key alone")


def check_text(name: str, text: str) -> None:
    """Raise ValueError for half a surrogate pair: what Python makes of bytes that are no text. UTF-8 cannot hold it."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{name} holds half of a surrogate pair; send a text that can be written as UTF-8")


@dataclass(frozen=True)
class Session:
    """A conversation the server remembers by `id`; each request holds the whole of it and the server reuses what it
    knows.
    """

    id: int
    start: bool = False  # the server creates the session, or forgets what it knew of it
    end: bool = False  # the server forgets the session after this request
    # The server interrupts the turn that is running, generates nothing, and with `end` forgets the session.
    stop: bool = False
    full_history: bool = True


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate. Exactly one of `prompt` and `messages` is given; the server applies the chat template to the
    latter.
    """

    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    end_id: int | None = None
    stop_words: list[str] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    exclude_input: bool = True
    return_log_probs: bool | None = None
    stream: bool = True
    session: Session | None = None
    namespace: str | None = None  # None stands for the client's own namespace

    def check(self) -> None:
        """Raise ValueError for what no server could accept."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages is needed")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens is {self.max_tokens}, at least 0 is expected")
        check_namespace(self.namespace or "")

    def parameters(self, timeout_s: float) -> dict[str, int | str]:
        """What travels beside the tensors: the deadline in microseconds, and the namespace unless it is empty."""
        found: dict[str, int | str] = {"timeout": int(timeout_s * 1e6)}
        return found | {"cache_salt": self.namespace} if self.namespace else found

    def tensors(self) -> dict[str, tuple[str, list[Any]]]:
        """Wire name -> (datatype, values), in wire order. Raises ValueError for a value that its type cannot hold."""
        self.check()
        found: dict[str, tuple[str, list[Any]]] = {}
        for name, (datatype, attribute) in INPUTS.items():
            value = getattr(self, attribute)
            if value is not None and value != []:
                found[name] = (datatype, value if isinstance(value, list) else [value])
        if self.messages is not None:
            found["text_input"] = ("BYTES", [""])  # the model asks for it always
            found["messages"] = ("BYTES", [json.dumps(self.messages, ensure_ascii=False)])
        for name in ("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"):
            found[name] = ("BOOL", [True])
        if self.session is not None:
            found["CORRID"] = ("UINT64", [self.session.id])
            for name, value in (("START", self.session.start), ("END", self.session.end), ("STOP", self.session.stop)):
                found[name] = ("INT32", [int(value)])
            found["session_full_history"] = ("BOOL", [self.session.full_history])
        for name, (datatype, values) in found.items():
            _check_values(name, datatype, values)
        return found

    def json_body(self) -> dict[str, Any]:
        """Body of HTTP generate: one-element tensors as scalars, word lists as lists."""
        lists = {"stop_words", "bad_words"}
        return {name: values if name in lists else values[0] for name, (_, values) in self.tensors().items()}


@dataclass(frozen=True)
class TextChunk:
    """A piece of generated text. The last chunk of an answer has `final` set and knows why it ended.

    `num_output_tokens` counts the tokens of this chunk; the other counts belong to the whole request.
    """

    text: str
    final: bool = False
    finish_reason: str | None = None
    num_output_tokens: int | None = None
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None  # those of the history and the prompt whose KV was still there
    num_context_tokens: int | None = None  # prompt tokens that had to be computed
    num_recomputed_tokens: int | None = None  # context tokens that had been computed before and were lost meanwhile
    first_token_time_ns: int | None = None  # by the server's monotonic clock
    last_token_time_ns: int | None = None
    log_probs: list[float] | None = None

    @classmethod
    def from_outputs(cls, outputs: Mapping[str, list[Any]], final: bool) -> TextChunk:
        """`outputs`: wire name -> flat list of values; outputs that were not sent are absent. No text = an empty
        chunk.
        """
        reason = _first(outputs, "finish_reason")
        return cls(
            text="".join(outputs.get("text_output", [])),
            final=final,
            finish_reason=None if reason in (None, "", "None") else reason,
            num_output_tokens=_first(outputs, "num_output_tokens"),
            num_input_tokens=_first(outputs, "num_input_tokens"),
            num_cached_tokens=_first(outputs, "num_cached_tokens"),
            num_context_tokens=_first(outputs, "num_context_tokens"),
            num_recomputed_tokens=_first(outputs, "num_recomputed_tokens"),
            first_token_time_ns=_first(outputs, "first_token_time_ns"),
            last_token_time_ns=_first(outputs, "last_token_time_ns"),
            log_probs=outputs.get("output_log_probs"),
        )


@dataclass(frozen=True)
class Completion:
    """A whole answer: all chunks put together."""

    text: str
    finish_reason: str | None
    num_output_tokens: int
    num_input_tokens: int | None
    num_cached_tokens: int | None
    num_context_tokens: int | None
    num_recomputed_tokens: int | None
    generation_s: float | None  # from the first to the last token, as the server saw it
    log_probs: list[float] | None

    @classmethod
    def from_chunks(cls, chunks: Iterable[TextChunk]) -> Completion:
        """Texts and counts of output tokens add up; of the rest the last value that was sent holds."""
        parts = list(chunks)
        first, last = _last(parts, "first_token_time_ns"), _last(parts, "last_token_time_ns")
        probs = [value for part in parts for value in part.log_probs or ()]
        return cls(
            text="".join(part.text for part in parts),
            finish_reason=_last(parts, "finish_reason"),
            num_output_tokens=sum(part.num_output_tokens or 0 for part in parts),
            num_input_tokens=_last(parts, "num_input_tokens"),
            num_cached_tokens=_last(parts, "num_cached_tokens"),
            num_context_tokens=_last(parts, "num_context_tokens"),
            num_recomputed_tokens=_last(parts, "num_recomputed_tokens"),
            generation_s=(last - first) / 1e9 if first and last and last >= first else None,
            log_probs=probs or None,
        )


def _check_values(name: str, datatype: str, values: list[Any]) -> None:
    if datatype == "BYTES":
        for text in values:
            check_text(name, text)
    minimum, maximum = RANGES.get(datatype, (0, 0))
    if datatype in RANGES and not all(minimum <= value <= maximum for value in values):
        raise ValueError(f"{name} is {values[0]}, allowed is {minimum} to {maximum}")


def _first(outputs: Mapping[str, list[Any]], name: str) -> Any:
    values = outputs.get(name)
    return values[0] if values else None


def _last(parts: list[TextChunk], name: str) -> Any:
    return next((value for part in reversed(parts) if (value := getattr(part, name)) is not None), None)
