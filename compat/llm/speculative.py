"""TensorRT-LLM's configurations of speculative decoding, as dictionaries or objects, as keys of SpeculationConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.api.draft_limits import drafts_of_lookahead
from compat.config_object import ConfigObject
from compat.llm.errors import NotHere, ParameterError

# field of a LookaheadDecodingConfig -> default
LOOKAHEAD = {"max_window_size": 4, "max_ngram_size": 3, "max_verification_set_size": 4}
# The type of a configuration, without underscores and in upper case -> speculation.mode
MODES = {"NGRAM": "lookup", "LOOKAHEAD": "lookup", "AUTO": "lookup", "DRAFTTARGET": "draft_model"}
DRAFT_MODEL_FIELDS = ("speculative_model_dir", "speculative_model")


def speculation_fields(given: Any) -> dict[str, Any]:
    """Fields of SpeculationConfig. The settings of NGram's own pool have no effect.

    Raises NotHere for a decoding type that is not served, and ParameterError without a decoding type or for a draft model
    without a checkpoint.
    """
    if given is None or (isinstance(given, ConfigObject) and given.refused):  # arguments.py refuses the latter
        return {}
    if isinstance(given, Mapping) and not given.get("decoding_type"):
        raise ParameterError(
            "speculative_config has no decoding_type; give one of NGram, Lookahead, AUTO and Draft_Target"
        )
    name = str(_field(given, "decoding_type") or type(given).__name__.removesuffix("DecodingConfig"))
    kind = name.replace("_", "").upper()
    if kind not in MODES:
        raise NotHere(f"speculative_config is of type {name}; served are NGram, Lookahead, AUTO and Draft_Target")
    fields: dict[str, Any] = {"mode": MODES[kind]}
    if kind == "LOOKAHEAD":
        fields["max_draft_tokens"] = max(1, lookahead_drafts(given))
    elif _field(given, "max_draft_len") is not None:
        fields["max_draft_tokens"] = _field(given, "max_draft_len")
    if kind == "NGRAM" and _field(given, "is_public_pool") is False:
        fields["max_shared_tokens"] = 0
    if kind == "DRAFTTARGET":
        path = next((path for field in DRAFT_MODEL_FIELDS if (path := _field(given, field))), None)
        if path is None:
            raise ParameterError("speculative_config names no draft model; give speculative_model_dir")
        fields["draft_model"] = str(path)
    return fields


def lookahead_drafts(given: Any) -> int:
    """Draft tokens of a step, from the sizes of lookahead decoding. Raises InvalidRequest for impossible sizes."""
    sizes = {name: _field(given, name) for name in LOOKAHEAD}
    return drafts_of_lookahead(*(LOOKAHEAD[name] if size is None else size for name, size in sizes.items()))


def _field(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
