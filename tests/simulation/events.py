"""What can happen to an engine, and a generator that makes it happen. Events are values, a list of them a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from backend.api import OutputConfig, Request, SamplingConfig, SessionConfig
from backend.api.guide import Guide, GuideType
from backend.api.request import BACKGROUND, RetentionConfig, TokenRangeRetention
from tests.simulation.model import Key, Model, Turn, key_of, reference_beams, reference_output
from tests.simulation.setups import MAX_SEQ_LEN, VOCAB, Setup


@dataclass(frozen=True)
class Enqueue:
    request_id: int
    request: Request


@dataclass(frozen=True)
class Cancel:
    request_id: int
    keep: int | None = None
    sequence_index: int | None = None


@dataclass(frozen=True)
class Stop:
    request_id: int
    session: Key
    end: bool


@dataclass(frozen=True)
class Poll:
    pass


@dataclass(frozen=True)
class Step:
    pass


@dataclass(frozen=True)
class Advance:
    seconds: float


@dataclass(frozen=True)
class FailNext:
    pass


@dataclass(frozen=True)
class Compile:
    """A guide has been compiled, or cannot be."""

    text: str
    error: str = ""


@dataclass(frozen=True)
class Tell:
    """The compiler says something of one request: that its time is up, or what is known already, or comes too late."""

    request_id: int
    error: str


Event = Enqueue | Cancel | Stop | Poll | Step | Advance | FailNext | Compile | Tell


class Generator:
    """Chooses the next event from the model's state. Each seed has habits: some things it does often, some never."""

    def __init__(self, rng: Random, more: Random, guides: Random, paused: Random, setup: Setup, model: Model) -> None:
        """`more` decides about requests for several sequences, `guides` about guides, `paused` about what is cancelled while it
        is paused; without them a schedule is the same as if there were none.
        """
        self._rng, self._paused = rng, paused
        self._guides = guides
        self.guided = guides.choice((0.0, 0.0, 0.3, 0.9))  # how often a request has a guide
        self._texts = guides.choice((("a",), ("a", "b", "c", "d", "e", "empty", "bad")))
        self._more = more
        self._setup = setup
        self._model = model
        self._next_id = 1
        # With a second level prompts come again, when the pool has lost their KV.
        self._again = Random(f"again {more.random()}") if setup.config.kv_cache.host_cache_bytes else None
        self._said: dict[str, list[list[int]]] = {}
        unit = (
            setup.config.kv_cache.block_size if setup.twins else rng.choice((1, 2, 4))
        )  # prefixes of whole blocks, or any
        self._prefixes = [self._ids(unit * rng.randint(1, 16 // unit)) for _ in range(rng.choice((1, 3)))]
        self._exact = rng.choice((0.2, 0.9))  # how often a prompt is a prefix and hardly more
        self._share_sessions = rng.choice((0.0, 0.3, 0.8, 1.0))
        self._rewinds = rng.choice((0.1, 0.5))
        self._salts = rng.choice((("",), ("", "", "", "a")))
        self._lengths = rng.choice(((0, 1, 2, 3, 5, 8, 12, 40), (0, 0, 1, 2), (8, 12, 40)))
        self._restarts = rng.choice((0.1, 0.3, 0.6))
        self._is_crowd = (
            rng.random() < 0.5 and not setup.twins
        )  # many short prompts that grow, each far smaller than the pool, together larger
        if self._is_crowd:
            self._lengths, self._share_sessions = (3, 5, 8, 12), rng.choice((0.0, 0.3))
        # how often a request asks for several sequences, and how often one of those asks for beams
        self.several = more.choice((0.5, 0.9) if setup.has_beams else (0.0, 0.0, 0.2, 0.6))
        self._beams = more.choice((0.5, 0.95, 0.95)) if setup.has_beams else 0.0
        self._width = more.choice((2, 2, 3, 4))  # of most of them: others do not run beside them
        if setup.has_beams:
            self._share_sessions = 0.2
        if setup.twins:
            self._prefixes = [self._ids(unit * rng.randint(1, 8 // unit))]
            self._share_sessions, self._rewinds, self._exact, self._salts, self._lengths = (
                0.8,
                0.6,
                0.9,
                ("",),
                (0, 0, 1),
            )
            self._restarts = 0.4
        if self._again is not None:
            self._share_sessions = min(self._share_sessions, self._again.choice((0.1, 0.3, 0.8)))
        self._behind = Random(repr(self._prefixes))  # which requests run in what others leave
        self._background = self._behind.choice((0.0, 0.0, 0.3, 0.8))
        rare = {Cancel: 4, Stop: 2, Advance: 2, FailNext: 0.7}
        habits = {kind: weight * rng.choice((0, 1, 2)) for kind, weight in rare.items()}
        self._weights = {Enqueue: rng.uniform(8, 20), Step: rng.uniform(20, 50), Poll: rng.choice((6, 30)), **habits}

    def next_event(self, paused: list[int]) -> Event:
        """`paused`: ids of requests with a paused sequence, for pauses are too short to be met by chance."""
        rng = self._rng
        if paused and self._paused.random() < 0.1:
            return Cancel(self._paused.choice(paused), None)
        if self.guided and self._guides.random() < 0.15:
            return self._of_the_compiler()
        kind = rng.choices(list(self._weights), list(self._weights.values()))[0]
        if kind is Enqueue:
            return self._enqueue()
        if kind is Cancel:
            index = self._more.choice((None, None, 0, 1)) if self.several else None
            return Cancel(
                rng.choice([*self._model.live, *self._model.held, 999_999]), rng.choice((None, None, 0, 1, 3)), index
            )
        if kind is Stop:
            return Stop(self._take_id(), rng.choice([*self._model.sessions, ("", 99)]), rng.random() < 0.4)
        if kind is Advance:
            return Advance(rng.choice((0.5, 3.0, 30.0)))
        return kind()

    def _of_the_compiler(self) -> Event:
        guides, held = self._guides, self._model.held
        if held and guides.random() < 0.8:
            text = guides.choice([each.request.guide.text for each in held.values() if each.request.guide is not None])
            return Compile(text, "the guide is bad" if text == "bad" else "")
        late = guides.random() < 0.5
        return Tell(
            guides.choice([*held, *self._model.live, 999_999]), "the guide was not compiled within" if late else ""
        )

    def _with_guide(self, request: Request) -> Request:
        """Sometimes ask for a form; min_tokens then mostly is what may be beside it."""
        guides = self._guides
        if guides.random() >= self.guided:
            return request
        sampling = request.sampling_config
        if guides.random() < 0.9:
            sampling = msgspec.structs.replace(sampling, min_tokens=guides.choice((None, 0, 1)))
        guide = Guide(GuideType.REGEX, guides.choice(self._texts))
        return msgspec.structs.replace(request, guide=guide, sampling_config=sampling)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(4) for _ in range(count)]

    def _enqueue(self) -> Enqueue:
        rng = self._rng
        is_duplicate = self._model.live and rng.random() < 0.03
        request_id = rng.choice(list(self._model.live)) if is_duplicate else self._take_id()
        salt = rng.choice(self._salts)
        session = self._session(salt) if rng.random() < self._share_sessions else None
        prompt, max_tokens = self._fit(self._prompt(salt, session), rng.choice(self._lengths))
        several = self._several_sequences() if session is None else {}
        width = several.get("beam_width", 1)
        if width > 1:
            prompt, max_tokens = self._fit_beams(prompt, width)
        request = Request(
            input_token_ids=prompt,
            max_tokens=max_tokens,
            streaming=rng.random() < 0.6,
            sampling_config=SamplingConfig(
                seed=rng.choice((None, None, rng.randrange(100))),
                presence_penalty=penalty if (penalty := rng.choice((None, 1.0))) and width == 1 else None,
                min_tokens=rng.choice((None, None, None, 2, 4)),
                **several,
            ),
            output_config=OutputConfig(
                rng.random() < 0.3,
                exclude_input_from_output=rng.random() < 0.5,
                return_perf_metrics=rng.random() < 0.3,
            ),
            timeout_s=rng.choice((None, None, None, 1.0, 5.0)),
            cache_salt=salt,
            priority=BACKGROUND if self._behind.random() < self._background else 0.5,
            retention=self._retention(),
            return_all_generated_tokens=rng.random() < 0.1,
            session=session,
        )
        return Enqueue(request_id, self._with_ends(request_id, self._with_guide(request) if self.guided else request))

    def _retention(self) -> RetentionConfig | None:
        if self._rng.random() < 0.8:
            return None
        first = self._rng.randrange(5)
        spans = (
            TokenRangeRetention(first, first + self._rng.randint(1, 5), self._rng.choice((0, 35, 90)), 2.0),
            TokenRangeRetention(first + 5, None, self._rng.choice((10, 100))),
        )
        return RetentionConfig(spans[: self._rng.randint(0, 2)], self._rng.choice((0, 35, 50)), 1.0)

    def _several_sequences(self) -> dict[str, Any]:
        """What a request's SamplingConfig says of several sequences."""
        more = self._more
        if more.random() >= self.several:
            return {}
        if more.random() >= self._beams:
            return {"num_return_sequences": more.choice((1, 2, 2, 3, 4, 8))}
        return {
            "beam_width": self._width if more.random() < 0.9 else more.choice((2, 3, 4, 6)),
            "num_return_sequences": more.choice((None, None, 2)),
            "length_penalty": more.choice((None, 1.0, -0.5)),
            "early_stopping": more.choice((None, 0, 2)),
        }

    def _session(self, salt: str) -> SessionConfig:
        rng = self._rng
        known = [number for namespace, number in self._model.sessions if namespace == salt]
        start = not known or rng.random() < self._restarts
        session_id = rng.randint(1, 5) if start or rng.random() < 0.05 else rng.choice(known)
        return SessionConfig(
            session_id,
            start=start,
            end=rng.random() < 0.2,
            step=self._rewind((salt, session_id)) if rng.random() < self._rewinds else None,
            session_len=rng.randint(3, 30) if rng.random() < 0.2 else None,
            full_history=rng.random() < self._rewinds / 2,
        )

    def _rewind(self, key: Key) -> int:
        """A number of tokens to keep: mostly near the end, sometimes beyond it."""
        session = self._model.sessions.get(key)
        length = len(session.log) if session else 5
        return max(0, length + self._rng.choice((-self._rng.randint(0, 4), -self._rng.randint(0, 25), 2)))

    def _prompt(self, salt: str, session: SessionConfig | None) -> list[int]:
        """Mostly what others have said as well: a common prefix, a running request's text, a session's own log."""
        rng = self._rng
        if self._again is not None and session is None and self._again.random() < 0.8:
            return self._said_before(salt, self._again)
        prompt = self._ids(rng.randint(1, 5))
        if rng.random() < 0.01:
            return rng.choice(([], [VOCAB]))
        if session is not None and not session.start:
            if session.full_history and (salt, session.id) in self._model.sessions:
                log = self._model.sessions[salt, session.id].log
                prompt = log[: rng.randint(0, len(log))] + prompt
            return prompt[-MAX_SEQ_LEN + 1 :]
        source = rng.random() + 0.5 * self._is_crowd
        if source < 0.6:
            prefix = rng.choice(self._prefixes)
            prompt = (
                prefix + self._ids(rng.choice((0, 1, 1))) if rng.random() < self._exact else self._cut(prefix) + prompt
            )
        elif source < 0.8 and self._model.live:
            turn = rng.choice(list(self._model.live.values()))
            prompt = self._cut(turn.prompt + turn.tokens) + prompt
        return prompt[: MAX_SEQ_LEN - 1]

    def _said_before(self, salt: str, again: Random) -> list[int]:
        """What somebody has said long ago, and perhaps a little more."""
        said = self._said.setdefault(salt, [])
        if len(said) < 3:
            said.append([again.randrange(4) for _ in range(again.randint(4, 20))])
        return (again.choice(said) + [again.randrange(4) for _ in range(again.randint(0, 3))])[: MAX_SEQ_LEN - 1]

    def _fit(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Mostly cut a request to what the pool and a step can hold: too much of it would only be refused."""
        cells = (self._model.capacity - self._model.watermark) * self._model.block_size
        if self._rng.random() < 0.15 or cells < 2:
            return prompt, max_tokens
        prompt = prompt[: min(cells - 1, self._model.max_prompt_tokens)]
        return prompt, min(max_tokens, cells + 1 - len(prompt))

    def _fit_beams(self, prompt: list[int], width: int) -> tuple[list[int], int]:
        """Outputs with which two requests are mostly more than the pool holds, one is not, and which part in other blocks."""
        prompt = prompt[: self._more.choice((1, 2, 3, 6))]
        cells = (self._model.capacity - self._model.watermark) // width * self._model.block_size
        return prompt, max(1, min(cells - len(prompt) + 1, self._more.choice((4, 8, 12))))

    def _cut(self, ids: list[int]) -> list[int]:
        return ids if self._rng.random() < 0.6 else ids[: self._rng.randint(0, len(ids))]

    def _with_ends(self, request_id: int, request: Request) -> Request:
        """Sometimes add an end id or a stop word that will really be generated."""
        rng = self._rng
        if rng.random() < 0.6 or self._model.judge(request_id, request) != "ok":
            return request
        outputs = self._preview(request)
        if not outputs:
            return request
        at = rng.randrange(len(outputs))
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        if rng.random() < 0.5:
            return Request(**{**fields, "end_ids": (outputs[at], 7)})
        return Request(**{**fields, "stop_words": [outputs[at : at + rng.randint(1, 3)], [5, rng.choice(outputs)]]})

    def _preview(self, request: Request) -> list[int]:
        history, new_ids = self._model.split(request)
        session = self._model.sessions.get(key_of(request)) if request.session and not request.session.start else None
        seed, counter = request.sampling_config.seed, 0
        if seed is None:
            seed, counter = (session.seed, session.counter) if session else (0, 0)
        namespace = session.namespace if session else request.cache_salt
        turn = Turn(request, history, new_ids, min(request.max_tokens, 8), seed, counter, namespace, 0)
        if request.sampling_config.beam_width > 1:
            return [token for beam in reference_beams(turn, self._setup)[-1:] for token in beam.tokens]
        return reference_output(turn, self._setup)[0]
