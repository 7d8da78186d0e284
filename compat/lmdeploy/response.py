"""Response: what a pipeline answers, with LMDeploy's fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
