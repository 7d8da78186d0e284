"""TextStream: turns the output tokens of one request into the text that the client may see.

    ids -> IncrementalDetokenizer -> stable text -> StopMatcher -> safe text

`finished_by` is the stop string that ended the text. `num_tokens_kept` is then the smallest number of output tokens whose text
contains everything up to the end of the stop string, and the engine cuts the session's history there. The last of these
tokens may contain more text than that, which the client never sees. Before a match, `num_tokens_kept` is the number of all
tokens pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.stop_strings import StopMatcher
from backend.text.tokenizer import Tokenizer


class TextDelta(Struct, frozen=True):
    """The text that one push has added."""

    text: str
    finished_by: str | None = None
    num_tokens_kept: int = 0


class TextStream:
    """A stream's state follows from the token ids alone: a new stream with the same prompt and output goes on in the same way."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._settings = (tokenizer, prompt_ids, stops, include_stop, skip_special_tokens, shown_ids)
        self._new_detokenizer: Callable[[Sequence[int]], IncrementalDetokenizer] = lambda ids: IncrementalDetokenizer(
            tokenizer, ids, skip_special_tokens, shown_ids
        )
        self._prompt_ids = prompt_ids
        self._detokenizer = self._new_detokenizer(prompt_ids)
        self._matcher = StopMatcher(stops, include_stop)
        self._ids: list[int] = []
        self._num_chars = 0  # the number of characters of stable text
        # The stream was last clean when its detokenizer held nothing back: the tokens and characters until then, and the
        # stable text since then.
        self._num_clean, self._chars_clean = 0, 0
        self._since_clean = ""
        self._num_kept: int | None = None

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Take in output tokens. After a stop string has been found, more tokens change nothing."""
        parts: list[str] = []
        for token_id in ids:
            if self._num_kept is not None:
                break
            if not self._detokenizer.holds:
                self._num_clean, self._chars_clean, self._since_clean = len(self._ids), self._num_chars, ""
            self._ids.append(token_id)
            parts.append(self._take(self._detokenizer.push((token_id,))))
        return self._delta("".join(parts))

    def flush(self) -> TextDelta:
        """The output is over: return the rest of the text, which does not end inside a character where the tokens do. Nothing
        may be pushed afterwards.
        """
        if self._num_kept is not None:
            return self._delta("")
        text = self._take(self._detokenizer.flush(in_characters=True))
        return self._delta(text + self._matcher.flush())

    def num_tokens_of(self, text: str) -> int:
        """The smallest number of output tokens whose text begins with `text`, which this stream has returned."""
        return self._fewest_tokens(text, 0)

    def restarted(self) -> TextStream:
        """A new stream with the same prompt and stop strings, and without output."""
        return TextStream(*self._settings)

    def _take(self, stable: str) -> str:
        safe, matched = self._matcher.push(stable)
        self._num_chars += len(stable)
        self._since_clean += stable
        if matched is not None:
            self._num_kept = self._tokens_up_to_stop()
        return safe

    def _delta(self, text: str) -> TextDelta:
        kept = len(self._ids) if self._num_kept is None else self._num_kept
        return TextDelta(text, self._matcher.matched, kept)

    def _tokens_up_to_stop(self) -> int:
        """How many tokens it takes to contain the text up to the end of the stop string.

        It replays the tokens since the stream was last clean, until their text reaches that end.

        stable text    0 ....... chars_clean ....... matcher.end ....... num_chars
        tokens         0 ....... num_clean  |  replayed, usually one  |  len(ids)
        """
        target = self._since_clean[: self._matcher.end - self._chars_clean]
        return self._fewest_tokens(target, self._num_clean)

    def _fewest_tokens(self, text: str, start: int) -> int:
        """The smallest n for which the text of the tokens [start, n) begins with `text`."""
        replay = self._new_detokenizer([*self._prompt_ids, *self._ids[:start]])
        stable = ""
        for n in range(start, len(self._ids)):
            if (stable + replay.peek()).startswith(text):
                return n
            stable += replay.push(self._ids[n : n + 1])
        return len(self._ids)
