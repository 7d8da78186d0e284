"""A generation request and its answer as plain values, and their form on the wire (KServe v2 tensors).

Text models take rank-2 tensors [1, 1] ([1, n] for word lists). What is None is not sent: the server's default holds.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from client import images
from client.checks import check_messages, check_namespace, check_texts, check_type, check_value
from client.guide import Guide

Message = Mapping[str, Any]  # role and content, and whatever else the model's chat template reads; JSON can hold it
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
    "num_return_sequences": ("INT32", "n"),
    "beam_width": ("INT32", "beam_width"),
    "length_penalty": ("FP32", "length_penalty"),
    "stop_words": ("BYTES", "stop_words"),
    "bad_words": ("BYTES", "bad_words"),
    "exclude_input_in_output": ("BOOL", "exclude_input"),
    "return_log_probs": ("BOOL", "return_log_probs"),
    "lora_name": ("BYTES", "lora_name"),
}
WORD_LISTS = ("stop_words", "bad_words")
MAX_FRESH_SEED = 1 << 32  # short enough to be typed again


@dataclass(frozen=True)
class Session:
    """A conversation that the server remembers by `id` (0 to 2**64 - 1) within the namespace of the request.

    `full_history`: each request holds the whole conversation, and the server reuses what it knows of it; without it, a
    request holds what is new.
    """

    id: int
    start: bool = False  # the server creates the session, or forgets what it knew of it
    end: bool = False  # the server forgets the session after this request
    # The server interrupts the turn that is running, generates nothing, and with `end` forgets the session.
    stop: bool = False
    full_history: bool = True

    def tensors(self) -> dict[str, tuple[str, list[Any]]]:
        """Wire name -> (datatype, values). Raises TypeError and ValueError for a field of another type or range."""
        found = {"CORRID": ("UINT64", [check_value("session.id", "UINT64", self.id)])}
        for name in ("start", "end", "stop"):
            found[name.upper()] = ("INT32", [int(check_value(f"session.{name}", "BOOL", getattr(self, name)))])
        whole = check_value("session.full_history", "BOOL", self.full_history)
        return found | {"session_full_history": ("BOOL", [whole])}


@dataclass(frozen=True)
class GenerateRequest:
    """The request of one generation. Exactly one of `prompt` and `messages` is given; the server applies the chat template to the
    latter. With `images` the model `everbatch` beside the text model is asked (client/images.py).
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
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
    n: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    stop_words: Sequence[str] = field(default_factory=list)
    bad_words: Sequence[str] = field(default_factory=list)
    exclude_input: bool = True
    return_log_probs: bool | None = None
    stream: bool = True
    lora_name: str | None = None
    guide: Guide | None = None
    session: Session | None = None
    namespace: str | None = None  # None stands for the client's own namespace
    images: Sequence[str] = ()  # encoded files in base64, one for each {"type": "image"} in the messages

    @property
    def num_streams(self) -> int:
        """How many outputs come in chunks of their own; all beams come in one."""
        return 1 if (self.beam_width or 1) > 1 else max(1, self.n or 1)

    @property
    def repeatable(self) -> bool:
        """True if it may be sent twice without harm: a turn that adds to its session might be added twice."""
        return self.session is None or self.session.full_history or self.session.start

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random, so that the seed makes a difference."""
        if (self.beam_width or 1) > 1 or self.temperature == 0 or self.top_k == 1:
            return False
        return self.temperature is not None or bool(self.top_k) or bool(self.top_p)

    def with_seed(self) -> GenerateRequest:
        """This request with a seed of its own where it samples and names none: the server's is one for all requests."""
        if self.seed is not None or not self.samples:
            return self
        return replace(self, seed=secrets.randbelow(MAX_FRESH_SEED))

    def check(self) -> None:
        """Raise TypeError or ValueError, naming the field, for what no server could accept."""
        self.tensors()
        check_namespace(self.namespace or "")

    def parameters(self, timeout_s: float) -> dict[str, int | str]:
        """Parameters of the request beside its tensors: the deadline in microseconds, and the namespace unless it is empty."""
        found: dict[str, int | str] = {"timeout": int(timeout_s * 1e6)}
        return found | {"cache_salt": self.namespace} if self.namespace else found

    def tensors(self) -> dict[str, tuple[str, list[Any]]]:
        """Wire name -> (datatype, values), in wire order. Raises TypeError for a value of another type and ValueError
        for one that its type cannot hold.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages is needed")
        if self.images:
            check_texts("images", self.images)
            self._messages_json()
            return {"request": ("BYTES", [json.dumps(images.json_request(self))])}
        found: dict[str, tuple[str, list[Any]]] = {}
        for name, (datatype, attribute) in INPUTS.items():
            values = self._values(datatype, attribute)
            if values:
                found[name] = (datatype, values)
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens is {self.max_tokens}, at least 0 is expected")
        if self.messages is not None:
            found["text_input"] = ("BYTES", [""])  # the model asks for it always
            found["messages"] = ("BYTES", [self._messages_json()])
        if self._samples_by_temperature:
            found["top_p"] = ("FP32", [1.0])
        for name in ("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"):
            found[name] = ("BOOL", [True])
        if self.guide is not None:
            check_type("guide", self.guide, Guide, "a Guide")
            found |= self.guide.tensors()
        if self.session is not None:
            check_type("session", self.session, Session, "a Session")
            found |= self.session.tensors()
        return found

    def model(self, text_model: str) -> str:
        """The Triton model that is asked."""
        return images.model_beside(text_model) if self.images else text_model

    def shape(self, count: int) -> list[int]:
        """The shape of a tensor of so many values."""
        return [count] if self.images else [1, count]

    def json_body(self) -> dict[str, Any]:
        """Body of HTTP generate: one-element tensors as scalars, word lists as lists."""
        return {name: values if name in WORD_LISTS else values[0] for name, (_, values) in self.tensors().items()}

    @property
    def _samples_by_temperature(self) -> bool:
        """True if the temperature alone asks for sampling: on TensorRT-LLM's wire it does so only beside top_k or top_p."""
        return bool(self.temperature) and not (self.top_k or self.top_p) and (self.beam_width or 1) == 1

    def _values(self, datatype: str, attribute: str) -> list[Any]:
        value = getattr(self, attribute)
        if attribute in WORD_LISTS:
            return check_texts(attribute, value)
        optional = type(self).__dataclass_fields__[attribute].default is None
        return [] if value is None and optional else [check_value(attribute, datatype, value)]

    def _messages_json(self) -> str:
        check_messages(self.messages)
        try:
            plain = [dict(message) for message in self.messages or ()]
            text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise TypeError(
                "messages hold a value that JSON cannot say; send texts, numbers, lists and dicts"
            ) from None
        check_value("messages", "BYTES", text)
        return text


@dataclass(frozen=True)
class TextChunk:
    """A piece of generated text. The last chunk of an answer has `final` set and knows why it ended.

    `num_output_tokens` counts the tokens of this chunk; the other counts belong to the whole request. With `n` a chunk is of
    one `sequence`. With beams `texts` holds those of all of them from their beginnings, and `text` is that of the best.
    """

    text: str
    final: bool = False
    finish_reason: str | None = None
    num_output_tokens: int | None = None
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None  # tokens of the history and the prompt whose KV was still cached
    num_context_tokens: int | None = None  # prompt tokens that had to be computed
    num_recomputed_tokens: int | None = None  # context tokens that had been computed before and were lost meanwhile
    first_token_time_ns: int | None = None  # by the server's monotonic clock
    last_token_time_ns: int | None = None
    log_probs: list[float] | None = None
    sequence: int = 0
    texts: Sequence[str] = ()
    seed: int | None = None  # None for a request that neither samples nor names a seed

    @classmethod
    def from_outputs(cls, outputs: Mapping[str, list[Any]], final: bool) -> TextChunk:
        """`outputs`: wire name -> flat list of values; outputs that were not sent are absent. No text = an empty
        chunk.
        """
        if "response" in outputs:  # the answer to a request with images
            outputs = images.outputs_of(json.loads(outputs["response"][0]))
        reason, texts = _first(outputs, "finish_reason"), outputs.get("text_output", [])
        return cls(
            text=texts[0] if texts else "",
            final=final,
            finish_reason=None if reason in (None, "", "None") else reason,
            num_output_tokens=_first(outputs, "num_output_tokens"),
            num_input_tokens=_first(outputs, "num_input_tokens"),
            num_cached_tokens=_first(outputs, "num_cached_tokens"),
            num_context_tokens=_first(outputs, "num_context_tokens"),
            num_recomputed_tokens=_first(outputs, "num_recomputed_tokens"),
            first_token_time_ns=_first(outputs, "first_token_time_ns"),
            last_token_time_ns=_first(outputs, "last_token_time_ns"),
            log_probs=None if len(texts) > 1 else _newest_log_probs(outputs),
            sequence=_first(outputs, "sequence_index") or 0,
            texts=texts if len(texts) > 1 else (),
        )


@dataclass(frozen=True)
class Completion:
    """A whole answer: all chunks put together.

    With `n` or beams `texts` holds all outputs, beams the best first; `text`, `finish_reason` and `log_probs` are those of the
    first one (of a beam there are no `log_probs`), and `num_output_tokens` counts those of all.
    """

    text: str
    finish_reason: str | None
    num_output_tokens: int
    num_input_tokens: int | None
    num_cached_tokens: int | None
    num_context_tokens: int | None
    num_recomputed_tokens: int | None
    generation_s: float | None  # from the first to the last token, as the server saw it
    log_probs: list[float] | None
    texts: list[str]
    seed: int | None = None  # with which a request that samples gives the same answer again

    @classmethod
    def from_chunks(cls, chunks: Iterable[TextChunk]) -> Completion:
        """Texts and counts of output tokens add up; of the rest, and of beams, the last value that was sent holds."""
        parts = list(chunks)
        first, last = _last(parts, "first_token_time_ns"), _last(parts, "last_token_time_ns")
        of_first = [part for part in parts if part.sequence == 0]
        probs = [value for part in of_first for value in part.log_probs or ()]
        texts = _texts(parts)
        return cls(
            text=texts[0],
            finish_reason=_last(of_first, "finish_reason"),
            num_output_tokens=sum(part.num_output_tokens or 0 for part in parts),
            num_input_tokens=_last(parts, "num_input_tokens"),
            num_cached_tokens=_last(parts, "num_cached_tokens"),
            num_context_tokens=_last(parts, "num_context_tokens"),
            num_recomputed_tokens=_last(parts, "num_recomputed_tokens"),
            generation_s=(last - first) / 1e9 if first and last and last >= first else None,
            log_probs=probs or None,
            texts=texts,
            seed=_last(parts, "seed"),
        )


def _texts(parts: list[TextChunk]) -> list[str]:
    beams = next((part.texts for part in reversed(parts) if len(part.texts) > 1), None)
    if beams is not None:
        return list(beams)
    texts = [""] * max((part.sequence + 1 for part in parts), default=1)
    for part in parts:
        texts[part.sequence] += part.text
    return texts


def _newest_log_probs(outputs: Mapping[str, list[Any]]) -> list[float] | None:
    """Log-probabilities of the chunk's own tokens: in a stream the server sends those of all tokens so far."""
    values, count = outputs.get("output_log_probs"), _first(outputs, "num_output_tokens")
    return values if values is None or count is None else values[max(0, len(values) - count) :]


def _first(outputs: Mapping[str, list[Any]], name: str) -> Any:
    values = outputs.get(name)
    return values[0] if values else None


def _last(parts: list[TextChunk], name: str) -> Any:
    return next((value for part in reversed(parts) if (value := getattr(part, name)) is not None), None)
