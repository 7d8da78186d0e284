"""Session: a conversation of a pipeline over several turns. Response: what a pipeline answers, with LMDeploy's fields."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compat.llm import RequestOutput
from compat.lmdeploy.vl import content_of, with_pictures

if TYPE_CHECKING:
    from compat.lmdeploy.pipeline import Pipeline


@dataclass
class Response:
    """`index`: number of the prompt in its list. `finish_reason`: stop, length or error; None while a stream goes on.

    Of an error `text` is the sentence that says why. In a stream `text`, `token_ids` and `logprobs` are what is new; the counts
    and `logits` are totals.
    `logprobs`: for each token a dictionary of token ids and log-probabilities. `logits`: [tokens, vocabulary], torch's.
    """

    text: str
    generate_token_len: int
    input_token_len: int
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: Any = None
    last_hidden_state: Any = None
    index: int = 0

    def extend(self, other: Response) -> Response:
        """Take the next piece of a stream in, and return itself."""
        self.text += other.text
        self.token_ids = self.token_ids + other.token_ids
        if other.logprobs:
            self.logprobs = (self.logprobs or []) + other.logprobs
        if other.logits is not None:
            self.logits = other.logits
        self.generate_token_len, self.input_token_len = other.generate_token_len, other.input_token_len
        self.finish_reason, self.index = other.finish_reason, other.index
        return self


_numbers = itertools.count(1)


class Session:
    """Holds the turns; the KV of earlier ones is found in the cache. For one thread at a time, but for `stop`.

    `history`: (prompt, answer) of each turn. `response`: the whole last answer. `step`: tokens of prompt and answer so far.
    """

    def __init__(self, pipe: Pipeline, session_id: int | None = None, gen_config: Any = None) -> None:
        self.session_id = next(_numbers) if session_id is None else session_id
        self.history: list[tuple[Any, str]] = []
        self.response: Response | None = None
        self.step = 0
        self.gen_config = gen_config
        self._pipe = pipe
        self.running: RequestOutput | None = None  # the turn that is being generated

    def __call__(self, prompt: Any, gen_config: Any = None, stream_response: bool = False, **fields: Any) -> Any:
        """The answer to a message: a Response, or an iterator over its pieces with `stream_response`."""
        pieces = self._pipe.turn(self, prompt, gen_config or self.gen_config, **fields)
        if stream_response:
            return pieces
        for _ in pieces:
            pass
        return self.response

    def messages(self, prompt: Any) -> list[dict[str, Any]]:
        """The conversation with the next message: a text, or (text, image)."""
        turns = [(("user", asked), ("assistant", answered)) for asked, answered in self.history]
        spoken = [*itertools.chain.from_iterable(turns), ("user", prompt)]
        return [{"role": role, "content": content_of(*with_pictures(said))} for role, said in spoken]

    def stop(self) -> None:
        """End the turn that is running, from another thread. What has come of it stays in the history."""
        if self.running is not None:
            self.running.abort()

    abort = stop

    def close(self) -> None:
        """Forget the conversation, and end its turn."""
        self.stop()
        self.history, self.response, self.step = [], None, 0
        self._pipe.forget(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
