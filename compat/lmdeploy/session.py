"""Session: a conversation of a pipeline over several turns."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from compat.llm import ParameterError, RequestOutput
from compat.lmdeploy.response import Response

if TYPE_CHECKING:
    from compat.lmdeploy.pipeline import Pipeline

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

    def __call__(self, prompt: str, gen_config: Any = None, stream_response: bool = False, **fields: Any) -> Any:
        """The answer to a message: a Response, or an iterator over its pieces with `stream_response`."""
        pieces = self._pipe.turn(self, prompt, gen_config or self.gen_config, **fields)
        if stream_response:
            return pieces
        for _ in pieces:
            pass
        return self.response

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """The conversation with the next message."""
        if not isinstance(prompt, str):
            raise ParameterError(f"the prompt of a turn is a {type(prompt).__name__}, a text is needed")
        turns = [(("user", asked), ("assistant", answered)) for asked, answered in self.history]
        spoken = [*itertools.chain.from_iterable(turns), ("user", prompt)]
        return [{"role": role, "content": text} for role, text in spoken]

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
