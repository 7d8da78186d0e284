"""The kinds of requests that the command kills engines under, and what a client of each keeps: the bytes that it was given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from backend.api import OutputConfig, Request, Response, SamplingConfig, SessionConfig
from backend.api.guide import Guide, GuideType
from backend.api.lora import LoraConfig
from backend.executor import Executor
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer

TEXT = "def main():\n    for line in open("
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}'
NUM_TOKENS = 64
GREEDY, NO_OUTPUTS = SamplingConfig(), OutputConfig()
SEEDED = dict(temperature=1.1, top_p=0.95, seed=1234)


@dataclass
class Kind:
    """A request, and for turns of a session the turns before it, each of which ends first."""

    request: Request
    before: tuple[Request, ...] = ()
    stops: tuple[str, ...] = ()  # stop strings, which the client's side looks for
    is_text: bool = False


def kinds(tokenizer: Tokenizer, adapter: Path) -> dict[str, Kind]:
    prompt = tokenizer.encode(TEXT)

    def ask(sampling: SamplingConfig = GREEDY, output: OutputConfig = NO_OUTPUTS, **fields: object) -> Request:
        given = {"input_token_ids": prompt, "max_tokens": NUM_TOKENS, "streaming": True} | fields
        return Request(sampling_config=sampling, output_config=output, **given)  # type: ignore[arg-type]

    wild = SamplingConfig(temperature=3.0, seed=5)  # many tokens that are part of a character
    log_probs = OutputConfig(return_log_probs=True)
    first = ask(SamplingConfig(**SEEDED), max_tokens=20, session=SessionConfig(1, start=True))  # type: ignore[arg-type]
    return {
        "greedy": Kind(ask()),
        "seeded": Kind(ask(SamplingConfig(**SEEDED))),  # type: ignore[arg-type]
        "long prompt": Kind(ask(SamplingConfig(**SEEDED), input_token_ids=prompt * 20)),  # type: ignore[arg-type]
        "penalties": Kind(ask(SamplingConfig(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4))),
        "stop string": Kind(
            ask(SamplingConfig(temperature=0.9, seed=3)), stops=("\n\n", "return", "self.", "import os")
        ),
        "half a character": Kind(ask(wild), is_text=True),
        "cumulative log-probs": Kind(ask(SamplingConfig(temperature=0.8, seed=8), log_probs)),
        "top log-probs": Kind(ask(output=OutputConfig(return_log_probs=True, top_log_probs=5))),
        "n = 4": Kind(ask(SamplingConfig(num_return_sequences=4, **SEEDED), log_probs)),  # type: ignore[arg-type]
        "beams": Kind(ask(SamplingConfig(beam_width=3), max_tokens=24)),
        "guide": Kind(ask(SamplingConfig(**SEEDED), guide=Guide(GuideType.JSON_SCHEMA, SCHEMA))),  # type: ignore[arg-type]
        "lora": Kind(ask(lora=LoraConfig(1, path=str(adapter)))),
        "logits": Kind(
            ask(output=OutputConfig(return_generation_logits=True, return_context_logits=True), max_tokens=24)
        ),
        "session": Kind(ask(input_token_ids=prompt[:5], session=SessionConfig(1)), before=(first,)),
        "drafts": Kind(ask(draft_tokens=[5, 6, 7, 8], input_token_ids=prompt * 3)),
        "not streaming": Kind(ask(SamplingConfig(**SEEDED), streaming=False)),  # type: ignore[arg-type]
        "not streaming, n = 3": Kind(ask(SamplingConfig(num_return_sequences=3, **SEEDED), streaming=False)),  # type: ignore[arg-type]
    }


def copies(kinds: dict[str, Kind], number: int) -> dict[str, Kind]:
    """So many of the kinds, again from the first where they are used up. A copy of a session's turn has a session of its own."""
    names = list(kinds)
    made: dict[str, Kind] = {}
    for index in range(number):
        name, time = names[index % len(names)], index // len(names) + 1
        made[name if time == 1 else f"{name} #{time}"] = _in_session(kinds[name], time)
    return made


def _in_session(kind: Kind, session_id: int) -> Kind:
    def moved(request: Request) -> Request:
        session = request.session
        return request if session is None else structs.replace(request, session=structs.replace(session, id=session_id))

    return replace(kind, request=moved(kind.request), before=tuple(moved(request) for request in kind.before))


@dataclass
class Heard:
    """Everything that a client of the Executor was given for one request, as bytes and figures that can be compared."""

    executor: Executor
    kind: Kind
    text: TextStream | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    top: dict[int, list[object]] = field(default_factory=dict)
    sums: dict[int, object] = field(default_factory=dict)
    reasons: dict[int, object] = field(default_factory=dict)
    rows: bytes = b""
    characters: str = ""
    text_is_over: bool = False
    beams: list[object] = field(default_factory=list)
    error: str = ""
    num_responses: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    on_first: Callable[[], None] = lambda: None

    def start(self, request: Request) -> None:
        self.request_id = self.executor.submit(request, self._hear)

    def told(self) -> object:
        """To be compared. The reason of a text that ended by a stop string is the text's."""
        return (
            *(self.error, self.tokens, self.log_probs, self.top, self.sums, self.rows, self.characters, self.beams),
            self.reasons if not self.kind.stops else None,
        )

    def _hear(self, response: Response) -> None:
        self.num_responses += 1
        self.on_first()
        if response.has_error():
            self.error = response.error_msg
            self.done.set()
            return
        result, index = response.result, response.result.sequence_index
        if self.text is not None and self.text_is_over:
            pass
        elif self.kind.request.sampling_config.beam_width > 1:
            self.beams.append((result.output_token_ids, result.cum_log_probs))
        else:
            self._keep(response)
        if result.is_sequence_final:
            self.reasons[index] = result.finish_reasons
        if response.is_final:
            if self.text is not None and not self.text_is_over:
                self.characters += self.text.flush().text
            self.done.set()

    def _keep(self, response: Response) -> None:
        result, index = response.result, response.result.sequence_index
        new = result.output_token_ids[0]
        self.tokens.setdefault(index, []).extend(new)
        for kept, part in ((self.log_probs, (result.log_probs or [[]])[0]), (self.top, result.top_log_probs or [])):
            kept.setdefault(index, []).extend(part)
        self.sums[index] = result.cum_log_probs
        for tensor in (result.context_logits, result.generation_logits):
            self.rows += b"" if tensor is None else tensor.data
        if self.text is not None:
            for token in new:
                delta = self.text.push([token])
                self.characters += delta.text
                if delta.finished_by is not None:
                    self.text_is_over = True
                    del self.tokens[index][delta.num_tokens_kept :]
                    self.executor.cancel_request(self.request_id, delta.num_tokens_kept)
                    return
