"""LLGuidanceBackend: grammars by llguidance (Earley parser over lexemes that are derivatives of regular expressions).

All that it does is bounded in steps of its own (LIMITS): a guide, or an output under it, that needs more ends with an error.
JSON may have WHITESPACE between its parts, and no more. A keyword of a schema that llguidance does not hold is an error that
names it (`lenient` is off), and a client cannot change these options (its key x-guidance is overridden).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from backend.api.guide import Guide, GuideType
from backend.guided.held import Held, compile_held
from backend.guided.holdable import LLGUIDANCE
from backend.guided.keywords import check_schema, parse_json
from backend.guided.loosening import Note
from backend.guided.protocol import GuideError, bits_of
from backend.guided.regexes import with_ascii_digits
from backend.guided.schema_parts import hold_formats
from backend.guided.sentences import LINE, is_gbnf, sentence
from backend.guided.structural_tag import Json, Maybe, Part, StructuralTag, Until, parse_structural_tag
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
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}


# The last line of each grammar: a text that must follow may be written in any tokens that spell it, an added token or its
# letters, and not only in those that a tokenizer would make of it. So masks allow what matchers accept.
_ANY_SPELLING = '%llguidance {"no_forcing": true}'


class _Tokens:
    """The vocabulary as llguidance takes it from a tokenizer. From the text of tokenizer.json it would itself decide which added
    tokens are special (all that are written <...>), and then allow ones that it refuses afterwards.
    """

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        """Asked only for text that a guide leaves no choice about, in grammars without _ANY_SPELLING."""
        raise NotImplementedError


class LLGuidanceBackend:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """`vocabulary.stop_ids` must not be empty."""
        ends = vocabulary.stop_ids
        tokens: Any = _Tokens(vocabulary, ends[0])
        self._tokenizer = llguidance.LLTokenizer(tokens, n_vocab=vocabulary.size, eos_token=list(ends))
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._stop_bits = bits_of(ends)
        self._special = vocabulary.special_texts

    def compile(self, guide: Guide) -> LLGuidanceGuide:
        return compile_held(guide, LLGUIDANCE._replace(holds=self._holds), self._compiled)

    def _holds(self, schema: Any) -> bool:
        try:
            rule = _json_rule("start", Json(schema, ""))
        except GuideError:
            return False
        return not self._matcher(f"{rule.text}\n{_ANY_SPELLING}").is_error()

    def _compiled(self, held: Held) -> LLGuidanceGuide:
        guide = held.guide
        grammar, lines = _grammar(guide, self._special)
        matcher = self._matcher(grammar)
        if matcher.is_error():
            error, line = matcher.get_error(), lines.get(1, _Line(""))
            if guide.type is not GuideType.EBNF_GRAMMAR and (found := LINE.match(error)):
                error, line = error[found.end() :], lines.get(int(found[1]), line)
            raise GuideError(f"it cannot be compiled: {sentence(error, guide, line.schema)}", line.place)
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GuideError(f"it cannot be held in full: {sentence(warnings[0], guide)}")
        return self._warmed(matcher, grammar, guide, held.notes)

    def load(self, portable: bytes) -> LLGuidanceGuide:
        """A guide crosses processes as its grammar only; compile the grammar again, while other threads run."""
        grammar = portable.decode()
        return self._warmed(self._matcher(grammar), grammar)

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _warmed(
        self, matcher: llguidance.LLMatcher, grammar: str, guide: Guide | None = None, notes: Sequence[Note] = ()
    ) -> LLGuidanceGuide:
        """The first mask builds most of the lexer, which copies then have."""
        twin = matcher.deep_copy()
        twin.compute_bitmask()
        if twin.is_error():
            raise GuideError(f"it cannot be compiled: {sentence(twin.get_error(), guide)}")
        return LLGuidanceGuide(twin, self._stop_bits, grammar.encode(), tuple(map(str, notes)))


class LLGuidanceGuide:
    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        stop_bits: list[tuple[int, np.int32]],
        portable: bytes,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._matcher, self._stop_bits = matcher, stop_bits
        self.portable, self.notes = portable, notes

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
        return sentence(self._matcher.get_error()) if self._matcher.is_error() else ""


def _grammar(guide: Guide, special: Mapping[str, int]) -> tuple[str, dict[int, _Line]]:
    """The guide in llguidance's terms, and its lines, from 1, with what they are made of, unless the client has written them.
    Raises GuideError.
    """
    match guide.type:
        case GuideType.JSON:
            lines = [_json_rule("start", Json({"type": "object"}, ""))]
        case GuideType.JSON_SCHEMA:
            lines = [_json_rule("start", Json(_schema(guide.text), ""))]
        case GuideType.REGEX:
            tree = json.loads(llguidance.LLMatcher.grammar_from_regex(with_ascii_digits(guide.text)))
            lines = [_Line(tree["grammars"][0]["lark_grammar"])]
        case GuideType.EBNF_GRAMMAR:
            return f"{_lark(guide)}\n{_ANY_SPELLING}", {}
        case GuideType.STRUCTURAL_TAG:
            lines = list(_TagGrammar(parse_structural_tag(guide.text), special).lines())
    return "\n".join([*(line.text for line in lines), _ANY_SPELLING]), dict(enumerate(lines, 1))


def _schema(text: str) -> Any:
    schema = parse_json(text)
    if schema is True:
        raise GuideError(
            "the schema is true, which any value satisfies; use type json for any object, or give a schema"
        )
    return schema


def _lark(guide: Guide) -> str:
    if not is_gbnf(guide):
        return guide.text
    try:
        return str(any_to_lark(guide.text))
    except Exception as error:  # the converter's own class, and whatever its recursion ends in
        raise GuideError(f"it cannot be read: {sentence(str(error), guide)}") from None


class _Line(NamedTuple):
    text: str
    place: str = ""
    schema: Any = None


class _TagGrammar:
    """Any text in which each trigger begins one of the structures that may follow it, or such a text up to the end of the first
    one; without triggers one structure. What a schema is made into is a rule in a line of its own, which errors name.
    """

    def __init__(self, tag: StructuralTag, special: Mapping[str, int]) -> None:
        """`special`: ids of the special tokens, by their texts."""
        self._tag = tag
        written = "\n".join(tag.texts())
        self._special = {text: token_id for text, token_id in special.items() if text in written}
        self._split = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")

    def lines(self) -> Iterator[_Line]:
        tag = self._tag
        if not tag.triggers:
            yield from self._run("start", list(range(len(tag.structures))), "", is_one=True)
            return
        tags = " | ".join(f"tag_{i}" for i in range(len(tag.triggers)))
        yield _Line(f"start: {tags} | tag_end" if tag.at_most_one else f"start: ({tags})* tag_end")
        yield _Line("tag_end: TAG_TEXT")
        yield _Line(r"TAG_TEXT: /(.|\n)*/")
        for i, trigger in enumerate(tag.triggers):
            yield _Line(f"tag_{i}_head{self._lazy(trigger)}: TAG_TEXT {self._quoted(trigger)}")
            yield _Line(f"tag_{i}: tag_{i}_head tag_{i}_body")
            yield from self._run(f"tag_{i}_body", tag.of_trigger(trigger), trigger, is_one=tag.at_most_one)

    def _run(self, name: str, places: list[int], trigger: str, is_one: bool) -> Iterator[_Line]:
        """A rule for one of the structures at these places, or for a group of them, behind a trigger."""
        group = self._tag.group
        if group is not None:
            begin, separator, end = group.begin[len(trigger) :], self._quoted(group.separator), self._quoted(group.end)
            more = "" if is_one else f"({separator} {name}_each)*"
            yield _Line(f"{name}: {self._quoted(begin)} {name}_each {more} {end}")
            name, trigger = f"{name}_each", ""
        yield _Line(f"{name}: " + " | ".join(f"{name}_{i}" for i in places))
        for i in places:
            structure = self._tag.structures[i]
            parts = [structure.begin[len(trigger) :], *structure.parts, structure.end]
            body, lines = self._body(f"{name}_{i}", parts)
            yield _Line(f"{name}_{i}: {body}")
            yield from lines

    def _body(self, name: str, parts: list[Part]) -> tuple[str, list[_Line]]:
        """Parts in the words of a rule, and the rules that it uses."""
        words, lines = list[str](), list[_Line]()
        for j, part in enumerate(parts):
            own = f"{name}_{j}"
            match part:
                case str():
                    words.append(self._quoted(part))
                    continue
                case Json():
                    lines.append(_json_rule(own, part))
                case Until(text):
                    lines.append(_Line(rf"{own}{self._lazy(text)}: /(.|\n)*/ {self._quoted(text)}"))
                case Maybe(inner):
                    body, further = self._body(own, inner)
                    words.append(f"({body})?")
                    lines += further
                    continue
            words.append(own)
        return " ".join(words) or '""', lines

    def _lazy(self, end: str) -> str:
        """The attribute of a rule for a text up to this end. A special token ends a text by itself."""
        return "" if self._split.search(end) else "[lazy]"

    def _quoted(self, text: str) -> str:
        """A text in the words of a rule: its special tokens by their ids."""
        words, start = list[str](), 0
        for found in self._split.finditer(text):
            words += [text[start : found.start()], f"<[{self._special[found.group()]}]>"]
            start = found.end()
        texts = [*words, text[start:]]
        return " ".join(word if i % 2 else json.dumps(word) for i, word in enumerate(texts) if word)


def _json_rule(name: str, part: Json) -> _Line:
    check_schema(part.schema, part.place)
    hold_formats(part.schema)
    schema = part.schema if isinstance(part.schema, dict) else {"allOf": [part.schema]}
    return _Line(f"{name}: %json {json.dumps({**schema, 'x-guidance': _OPTIONS})}", part.place, part.schema)
