"""How an Executor decodes: the mode, logits post-processors, guided decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from compat.trtllm.enums import Enumeration
from compat.trtllm.kinds import BOOL, CALLABLE, INT32, STR, dict_of, list_of, of, optional
from compat.trtllm.record import Record, field
from compat.trtllm.request_configs import EagleConfig, LookaheadDecodingConfig


class DecodingMode:
    """The method that chooses tokens. Static methods make one, and `isX` methods ask which it is. Compares by value."""

    def __init__(self, name: str = "Auto") -> None:
        self.name = name

    @staticmethod
    def Auto() -> DecodingMode:
        """Each request's SamplingConfig decides."""
        return DecodingMode("Auto")

    @staticmethod
    def TopK() -> DecodingMode:
        return DecodingMode("TopK")

    @staticmethod
    def TopP() -> DecodingMode:
        return DecodingMode("TopP")

    @staticmethod
    def TopKTopP() -> DecodingMode:
        return DecodingMode("TopKTopP")

    @staticmethod
    def BeamSearch() -> DecodingMode:
        return DecodingMode("BeamSearch")

    @staticmethod
    def Medusa() -> DecodingMode:
        return DecodingMode("Medusa")

    @staticmethod
    def Lookahead() -> DecodingMode:
        return DecodingMode("Lookahead")

    @staticmethod
    def ExplicitDraftTokens() -> DecodingMode:
        return DecodingMode("ExplicitDraftTokens")

    @staticmethod
    def ExternalDraftTokens() -> DecodingMode:
        return DecodingMode("ExternalDraftTokens")

    @staticmethod
    def Eagle() -> DecodingMode:
        return DecodingMode("Eagle")

    def isAuto(self) -> bool:
        return self.name == "Auto"

    def isTopK(self) -> bool:
        """TopKTopP counts, too."""
        return self.name in ("TopK", "TopKTopP")

    def isTopP(self) -> bool:
        """TopKTopP counts, too."""
        return self.name in ("TopP", "TopKTopP")

    def isTopKorTopP(self) -> bool:
        return self.isTopK() or self.isTopP()

    def isTopKandTopP(self) -> bool:
        return self.name == "TopKTopP"

    def isBeamSearch(self) -> bool:
        return self.name == "BeamSearch"

    def isMedusa(self) -> bool:
        return self.name == "Medusa"

    def isLookahead(self) -> bool:
        return self.name == "Lookahead"

    def isExplicitDraftTokens(self) -> bool:
        return self.name == "ExplicitDraftTokens"

    def isExternalDraftTokens(self) -> bool:
        return self.name == "ExternalDraftTokens"

    def isEagle(self) -> bool:
        return self.name == "Eagle"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodingMode) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"DecodingMode.{self.name}()"


class DecodingConfig(Record):
    """The decoding mode, and the settings of some modes. Setting those of a mode sets the mode."""

    decoding_mode: DecodingMode | None = field(optional(of(DecodingMode)), default=None)
    lookahead_decoding_config: LookaheadDecodingConfig | None = field(
        optional(of(LookaheadDecodingConfig)), default=None
    )
    medusa_choices: list[list[int]] | None = field(optional(list_of(list_of(INT32))), default=None)
    eagle_config: EagleConfig | None = field(optional(of(EagleConfig)), default=None)

    _MODES: ClassVar[dict[str, Callable[[], DecodingMode]]] = {
        "lookahead_decoding_config": DecodingMode.Lookahead,
        "medusa_choices": DecodingMode.Medusa,
        "eagle_config": DecodingMode.Eagle,
    }

    def _made(self) -> None:
        for name in self._MODES:
            if getattr(self, name) is not None:
                self._set_mode_of(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._MODES and value is not None:
            self._set_mode_of(name)

    def _set_mode_of(self, part: str) -> None:
        self.decoding_mode = self._MODES[part]()


class LogitsPostProcessorConfig(Record):
    """Functions that change logits: by name, for requests that name one, or one for all requests that opt in.

    `processor_map`: name -> f(request id, logits, tokens of each beam, stream, client id); a name without a function is ignored.
    `processor_batched`: the same with a list in place of each value. `replicate` has no effect: of several
    ranks one alone samples, and calls them.
    """

    processor_map: dict[str, Callable[..., Any] | None] | None = field(
        optional(dict_of(STR, optional(CALLABLE))), default=None
    )
    processor_batched: Callable[..., Any] | None = field(optional(CALLABLE), default=None)
    replicate: bool = field(BOOL, default=True)


class GuidedDecodingConfig(Record):
    """Set-up of guided decoding. `encoded_vocab`: the tokens' texts, sorted by id."""

    class GuidedDecodingBackend(Enumeration):
        """The library that compiles grammars."""

        XGRAMMAR = 0
        LLGUIDANCE = 1

    backend: GuidedDecodingBackend = field(of(GuidedDecodingBackend))
    encoded_vocab: list[str] | None = field(optional(list_of(STR)), default=None)
    tokenizer_str: str | None = field(optional(STR), default=None)
    stop_token_ids: list[int] | None = field(optional(list_of(INT32)), default=None)
