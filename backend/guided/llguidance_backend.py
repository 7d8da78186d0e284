"""LLGuidanceBackend: grammars by llguidance (Earley parser over lexemes that are derivatives of regular expressions).

All that it does is bounded in steps of its own (LIMITS): a guide, or an output under it, that needs more ends with an error.
JSON may have WHITESPACE between its parts, and no more. A keyword of a schema that llguidance does not hold is an error that
names it (`lenient` is off), and a client cannot change these options (its key x-guidance is overridden).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from backend.api.guide import Guide, GuideType
from backend.guided.json_text import check_schema, parse_json
from backend.guided.protocol import GuideError, bits_of
from backend.guided.structural_tag import StructuralTag, Structure, parse_structural_tag
from backend.guided.vocabulary import Vocabulary

WHITESPACE = r" ?|\n[ ]{0,32}"  # one space, or a line break with an indentation
_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": WHITESPACE,
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
_ANY_OBJECT = '{"type":"object"}'
# What a compiled guide takes is not told; these are above what has been seen of the sets in docs/guided-decoding.md.
_BYTES_AT_LEAST, _BYTES_PER_BYTE = 64 << 10, 256
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}

_OBVIOUS = "failed to compile JSON schema: "  # what "it cannot be compiled" has said before
_LINE = re.compile(r"at (\d+)\(\d+\): ")  # line and column in a grammar that was made of what the client wrote
# What is found in errors -> what stands in its place and what follows it; {} is what there was.
_SENTENCES = (
    ("Unimplemented keys", "{}; leave them out"),
    ("Invalid type", "{}; give null, boolean, integer, number, string, array or object"),
    ("Unknown format", "{}; leave it out, or use pattern"),
    ("oneOf constraints", "oneOf is held only where no value fits two of its branches; use anyOf"),
    ("Default retriever", "$ref leads within a schema only; put what it names there"),
)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._greedy = _Greedy(vocabulary)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._greedy(text.encode() if isinstance(text, str) else text)


class _Greedy:
    """The longest token first. llguidance asks only for text that a guide leaves no choice about."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = vocabulary.special_ids
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token := self._ids.get(text[start:end])) is not None:
                    ids.append(token)
                    start = end
                    break
            else:
                start += 1  # a byte that no token stands for
        return ids


class LLGuidanceBackend:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """`vocabulary.stop_ids` must not be empty."""
        ends = vocabulary.stop_ids
        source: Any = vocabulary.tokenizer_str or _Tokens(vocabulary, ends[0])
        self._tokenizer = llguidance.LLTokenizer(source, n_vocab=vocabulary.size, eos_token=list(ends))
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._stop_bits = bits_of(ends)

    def compile(self, guide: Guide) -> LLGuidanceGuide:
        grammar, places = _grammar(guide)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            sentence, place = _sentence(matcher.get_error()), ""
            if guide.type is not GuideType.EBNF_GRAMMAR and (found := _LINE.match(sentence)):
                sentence, place = sentence[found.end() :], places.get(int(found[1]), "")
            raise GuideError(f"it cannot be compiled: {sentence}", place)
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GuideError(f"it cannot be held in full: {_sentence(warnings[0])}")
        mask = bytearray(4 * ((self._tokenizer.vocab_size + 31) // 32))
        twin = matcher.deep_copy()
        mask[:] = twin.compute_bitmask()[: len(mask)]  # the first mask builds most of the lexer, which copies then have
        if twin.is_error():
            raise GuideError(f"it cannot be compiled: {_sentence(twin.get_error())}")
        return LLGuidanceGuide(twin, self._stop_bits, _BYTES_AT_LEAST + _BYTES_PER_BYTE * len(grammar))


class LLGuidanceGuide:
    def __init__(self, matcher: llguidance.LLMatcher, stop_bits: list[tuple[int, np.int32]], num_bytes: int) -> None:
        self._matcher, self._stop_bits = matcher, stop_bits
        self.num_bytes = num_bytes

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._stop_bits)


class LLGuidanceMatcher:
    def __init__(self, matcher: llguidance.LLMatcher, stop_bits: list[tuple[int, np.int32]]) -> None:
        self._matcher, self._stop_bits = matcher, stop_bits
        self.accept = matcher.consume_token

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        width = masks.strides[0]
        self._matcher.unsafe_compute_mask_ptr(masks.ctypes.data + row * width, width)
        for word, bit in self._stop_bits:
            masks[row, word] &= ~bit

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def error(self) -> str:
        return _sentence(self._matcher.get_error()) if self._matcher.is_error() else ""


def _grammar(guide: Guide) -> tuple[str, dict[int, str]]:
    """The guide in llguidance's terms, and what of the guide's text some lines of it are made of. Raises GuideError."""
    match guide.type:
        case GuideType.JSON:
            return _of_schema(_ANY_OBJECT), {}
        case GuideType.JSON_SCHEMA:
            return _of_schema(guide.text), {}
        case GuideType.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(guide.text), {}
        case GuideType.EBNF_GRAMMAR:
            return llguidance.LLMatcher.grammar_from_lark(_lark(guide.text)), {}
        case GuideType.STRUCTURAL_TAG:
            lines = list(_of_tags(parse_structural_tag(guide.text)))
            return "\n".join(line.text for line in lines), {i: line.place for i, line in enumerate(lines, 1)}


def _of_schema(text: str) -> str:
    schema = parse_json(text)
    check_schema(schema)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        raise GuideError(f"it cannot be compiled: {_sentence(str(error))}") from None


def _lark(text: str) -> str:
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter's own class, and whatever its recursion ends in
        raise GuideError(f"it cannot be read: {_sentence(str(error))}") from None


class _Line(NamedTuple):
    text: str
    place: str = ""


def _of_tags(tag: StructuralTag) -> Iterator[_Line]:
    """Any text in which each trigger begins one of the structures that begin with it, or such a text up to the end of the first
    one; without triggers one structure. Each structure is a rule in a line of its own, which errors name.
    """
    yield _Line("%llguidance {}")
    if not tag.triggers:
        yield from _rule("start", tag, "")
        return
    tags = " | ".join(f"tag_{i}" for i in range(len(tag.triggers)))
    yield _Line(f"start: {tags} | tag_end" if tag.at_most_one else f"start: ({tags})* tag_end")
    yield _Line("tag_end: TAG_TEXT")
    yield _Line(r"TAG_TEXT: /(.|\n)*/")
    for i, trigger in enumerate(tag.triggers):
        yield _Line(f"tag_{i}_head[lazy]: TAG_TEXT {_quoted(trigger)}")
        yield _Line(f"tag_{i}: tag_{i}_head tag_{i}_body")
        yield from _rule(f"tag_{i}_body", tag, trigger)


def _rule(name: str, tag: StructuralTag, trigger: str) -> Iterator[_Line]:
    """A rule for one of the structures that begin with a trigger, which stands ahead of it."""
    begun = [i for i, structure in enumerate(tag.structures) if structure.begin.startswith(trigger)]
    yield _Line(f"{name}: " + " | ".join(f"{name}_{i}" for i in begun))
    for i in begun:
        structure, place = tag.structures[i], f".structures[{i}].schema"
        yield _Line(f"{name}_{i}: {_body(structure, structure.begin[len(trigger) :], place)}", place)


def _body(structure: Structure, begin: str, place: str) -> str:
    """A structure of which `begin` is still to come."""
    check_schema(structure.schema, place)
    schema = structure.schema if isinstance(structure.schema, dict) else {"allOf": [structure.schema]}
    text = json.dumps({**schema, "x-guidance": _OPTIONS})
    return f"{_quoted(begin)} %json {text} {_quoted(structure.end)}"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _sentence(text: str) -> str:
    """An error of llguidance as one sentence: its first line, a reason that stands further below, and what to do about it."""
    lines = text.split("\n")
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    sentence = " ".join(f"{lines[0]} {reason}".split()).replace(_OBVIOUS, "")
    for start, replacement in _SENTENCES:
        if start in sentence:
            sentence = sentence[: sentence.index(start)] + replacement.format(sentence[sentence.index(start) :])
    return sentence[:300] or "it is too complex"
