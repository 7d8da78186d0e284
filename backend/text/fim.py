"""Fill in the middle: the prompt by which a model writes the text between a prefix and a suffix, as it was trained.

    prefix first   [BOS] files [prefix] prefix [suffix] suffix [middle]
    suffix first   [BOS] files [suffix] suffix [prefix] prefix [middle]

FORMS says which tokens a family of models has for this; a tokenizer has a form if it has all of its tokens. Sources: the papers
and model cards of Qwen2.5-Coder, StarCoder 1 and 2, CodeGemma, DeepSeek-Coder, Seed-Coder, Granite and Code Llama, and
mistral-common for Codestral. The names of repository and current file, which clients do not send, are llama-server's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from backend.api.errors import InvalidRequest
from backend.text.tokenizer import Tokenizer

REPOSITORY, CURRENT_FILE = "myproject\n", "filename\n"
MAX_MARKS = 1000  # names of special tokens in one text: each takes a call of the tokenizer
_ANCHOR = "☺"  # as mistral-common has it: no token begins with it and holds more


class FimForm(NamedTuple):
    """Tokens by their texts; '' for one that the form does not have.

    `repository` stands in front of all files, `file` in front of the path of each; without the latter a file has `heading` in
    front, and is a part of the prefix. `path_in_prefix`: the path of the current file follows `prefix`. `ends`: tokens that end
    the middle, besides the model's end tokens and `tokens`; a tokenizer need not have them.
    """

    name: str
    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    file: str = ""
    heading: str = "#{path}\n"
    suffix_first: bool = False
    path_in_prefix: bool = False
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, self.suffix, self.middle, self.repository, self.file)))


_BARS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_PLAIN = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
FORMS = (  # the first one that a tokenizer has is its own
    FimForm("qwen", *_BARS, "<|repo_name|>", "<|file_sep|>", ends=("<|fim_pad|>", "<|endoftext|>")),
    FimForm("granite", *_BARS, "<|reponame|>", "<|filename|>", ends=("<|fim_pad|>", "<|end_of_text|>")),
    FimForm("codegemma", *_BARS, "", "<|file_separator|>", ends=("<eos>",)),
    FimForm("starcoder2", *_PLAIN, "<repo_name>", "<file_sep>", path_in_prefix=True, ends=("<|endoftext|>",)),
    FimForm("starcoder", *_PLAIN, "<reponame>", "<filename>", ends=("<fim_pad>", "<|endoftext|>")),
    FimForm("deepseek", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),
    FimForm("seed", "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    FimForm("codestral", "[PREFIX]", "[SUFFIX]", "", heading="+++++ {path}\n", suffix_first=True),
    FimForm("codellama", "▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    FimForm("bars", *_BARS),
    FimForm("plain", *_PLAIN, ends=("<|endoftext|>",)),
)


class Gap(NamedTuple):
    """The two texts around the text that is wanted, and the other files of the project that may help, as (path, text)."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()


class Filling(NamedTuple):
    """A prompt, the tokens that end the middle besides the model's own, and how many of the first files did not fit."""

    ids: list[int]
    end_ids: tuple[int, ...]
    files_left_out: int


class FimWriter:
    """Writes the prompts for one tokenizer. Does not change, and may be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, form: FimForm) -> None:
        self.form, self._tokenizer = form, tokenizer
        special = (tokenizer.visible_token(token_id, False) or "" for token_id in tokenizer.special_ids)
        names = sorted({*special, *form.tokens, *form.ends} - {""}, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, names)))
        first = tokenizer.encode("")
        self._begin = [first[0]] if first and first[0] == tokenizer.bos_id else []
        pieces = [
            tokenizer.visible_token(token_id, False) for token_id in tokenizer.encode("x", add_special_tokens=False)
        ]
        self._adds_space = (pieces[:1] or [None])[0] in ("▁", "▁x")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FimWriter | None:
        """None for a tokenizer that has no form's tokens."""
        has = (form for form in FORMS if all(tokenizer.token_to_id(token) is not None for token in form.tokens))
        form = next(has, None)
        return None if form is None else cls(tokenizer, form)

    def written(self, gap: Gap, room: int) -> Filling:
        """The prompt. Files that would make it longer than `room` tokens are left out whole, from the first one on; prefix and
        suffix are never cut. Raises InvalidRequest for what is no Unicode text, and for too many names of special tokens.
        """
        form = self.form
        prefix, suffix = self._text(gap.prefix, is_inside=False), self._text(gap.suffix)
        front = self._token(form.repository) + (self._text(REPOSITORY) if form.repository else [])
        current = self._text(CURRENT_FILE) if form.file else []
        separated = self._token(form.file)
        frame = sum(map(len, (front, separated, current, prefix, suffix))) + 3 + len(self._begin)
        files = self._fitting(gap.files, room - frame)
        count = len(files)
        shown = [token_id for file in reversed(files) for token_id in file]
        ahead: list[int] = []
        if not form.file:
            prefix = shown + prefix
        elif shown and form.path_in_prefix:
            ahead, prefix = front + shown + separated, current + prefix
        elif shown:
            ahead = front + shown + separated + current
        before, behind = self._token(form.prefix) + prefix, self._token(form.suffix) + suffix
        parts = behind + before if form.suffix_first else before + behind
        ids = [*self._begin, *ahead, *parts, *self._token(form.middle)]
        return Filling(ids, self._end_ids, len(gap.files) - count)

    def _fitting(self, files: Sequence[tuple[str, str]], room: int) -> list[list[int]]:
        """The token ids of the last files that fit together, the last one first."""
        found: list[list[int]] = []
        for path, text in reversed(files):
            if self._tokenizer.least_tokens(text) > room:
                break
            head = "" if self.form.file else self.form.heading.format(path=path)
            named = self._token(self.form.file) + (self._text(f"{path}\n") if self.form.file else [])
            ids = named + self._text(f"{head}{text}" + ("" if text.endswith("\n") else "\n"))
            if len(ids) > room:
                break
            room -= len(ids)
            found.append(ids)
        return found

    @property
    def _end_ids(self) -> tuple[int, ...]:
        """Tokens behind which nothing of the middle follows: another file, another gap, or the end of the text."""
        found = (self._tokenizer.token_to_id(token) for token in (*self.form.ends, *self.form.tokens))
        return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))

    def _token(self, text: str) -> list[int]:
        token_id = self._tokenizer.token_to_id(text) if text else None
        return [] if token_id is None else [token_id]

    def _text(self, text: str, is_inside: bool = True) -> list[int]:
        """Token ids of a text, in which the text of a special token is text. `is_inside`: without the space that some tokenizers
        put in front of every text; the prefix was trained with it.
        """
        ids: list[int] = []
        start = 0
        for number, found in enumerate(self._marks.finditer(text)):  # cut behind its first character, no mark is whole
            if number == MAX_MARKS:
                raise InvalidRequest(
                    f"a text around the gap holds the names of more than {MAX_MARKS} special tokens, the limit; shorten it"
                )
            ids += self._plain(text[start : found.start() + 1], is_inside or start > 0)
            start = found.start() + 1
        return ids + self._plain(text[start:], is_inside or start > 0)

    def _plain(self, text: str, is_inside: bool) -> list[int]:
        if not (is_inside and self._adds_space and text):
            return self._tokenizer.encode(text, add_special_tokens=False)
        anchor = self._tokenizer.encode(_ANCHOR, add_special_tokens=False)
        ids = self._tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self._tokenizer.encode(text, False)
