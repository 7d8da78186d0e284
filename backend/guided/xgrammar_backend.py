"""XGrammarBackend: grammars by xgrammar, which is installed besides (requirements/xgrammar.txt).

It is here to be compared with and for who wants it. It drops keywords of JSON Schema that it does not hold: those that are known
are refused here by name (guided/holdable.py). docs/guided-decoding.md has the figures.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import xgrammar
from numpy.typing import NDArray

from backend.api.guide import Guide, GuideType
from backend.guided.held import Held, compile_held
from backend.guided.holdable import XGRAMMAR
from backend.guided.keywords import check_schema, parse_json
from backend.guided.protocol import GuideError, bits_of
from backend.guided.schema_parts import open_parts
from backend.guided.structural_tag import Json, StructuralTag, parse_structural_tag
from backend.guided.vocabulary import Vocabulary

_MAX_WHITESPACE = 33  # characters in a row


class XGrammarBackend:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [b"" if i in vocabulary.special_ids else token for i, token in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.stop_ids)
        )
        self._stop_bits = bits_of(vocabulary.stop_ids)
        self._special = vocabulary.special_texts
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, guide: Guide) -> XGrammarGuide:
        return compile_held(guide, XGRAMMAR._replace(holds=self._holds), self._of_held)

    def _holds(self, schema: Any) -> bool:
        try:
            self._of_held(Held(Guide(GuideType.JSON_SCHEMA, json.dumps(schema)), []))
        except GuideError:
            return False
        return True

    def _of_held(self, held: Held) -> XGrammarGuide:
        try:
            portable = msgspec.msgpack.encode(held.guide)
            return XGrammarGuide(self._compiled(held.guide), self._stop_bits, portable, tuple(map(str, held.notes)))
        except GuideError:
            raise
        except Exception as error:  # whatever the library raises for a guide that it cannot read
            line = str(error).strip().rpartition("\n")[2]
            raise GuideError(f"it cannot be compiled: {line[:300]}") from None

    def load(self, portable: bytes) -> XGrammarGuide:
        """The guide itself is carried over, for what the library writes of a compiled one takes longer than to compile it."""
        return self._of_held(Held(msgspec.msgpack.decode(portable, type=Guide), []))

    def _compiled(self, guide: Guide) -> xgrammar.CompiledGrammar:
        match guide.type:
            case GuideType.JSON:
                return self._of_schema('{"type":"object"}')
            case GuideType.JSON_SCHEMA:
                return self._of_schema(guide.text)
            case GuideType.REGEX:
                return self._compiler.compile_regex(guide.text)
            case GuideType.EBNF_GRAMMAR:
                return self._compiler.compile_grammar(guide.text)
            case GuideType.STRUCTURAL_TAG:
                return self._of_tag(parse_structural_tag(guide.text))

    def _of_tag(self, tag: StructuralTag) -> xgrammar.CompiledGrammar:
        own = {"free_text": not tag.triggers, "at_most_one": tag.at_most_one, "group": tag.group is not None}
        if (
            mark := next((text for text in self._special if any(text in each for each in tag.texts())), None)
        ) is not None:
            own[f"the special token {mark[:80]}"] = True
        items = list[xgrammar.StructuralTagItem]()
        for each in tag.structures:
            match each.parts:
                case [Json(schema, _)]:
                    open_parts(schema)
                    items.append(xgrammar.StructuralTagItem(begin=each.begin, schema=json.dumps(schema), end=each.end))
                case _:
                    own["parts"] = True
        if (key := next((key for key, is_given in own.items() if is_given), None)) is not None:
            raise GuideError(f"xgrammar takes no structural tag with {key}; use guided.backend=llguidance")
        return self._compiler.compile_structural_tag(items, tag.triggers)

    def _of_schema(self, text: str) -> xgrammar.CompiledGrammar:
        schema = parse_json(text)
        check_schema(schema)
        return self._compiler.compile_json_schema(
            json.dumps(schema), strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE
        )


class XGrammarGuide:
    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        stop_bits: list[tuple[int, np.int32]],
        portable: bytes,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._compiled, self._stop_bits = compiled, stop_bits
        self.portable, self.notes = portable, notes

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._stop_bits)


class XGrammarMatcher:
    error = ""

    def __init__(self, matcher: xgrammar.GrammarMatcher, stop_bits: list[tuple[int, np.int32]]) -> None:
        self._matcher, self._stop_bits = matcher, stop_bits

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        self._matcher.fill_next_token_bitmask(masks, row)
        for word, bit in self._stop_bits:
            masks[row, word] &= ~bit

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())
