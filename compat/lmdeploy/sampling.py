"""LMDeploy's GenerationConfig as compat.llm's SamplingParams, and its engine configurations as one of this project."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from backend.api import EngineConfig
from backend.api.config.checks import check_config
from backend.api.foreign import ForeignTable, RefusedParameter, Setting, UnknownParameter, put
from compat.llm import GuidedDecodingParams, NotHere, ParameterError, SamplingParams
from compat.llm.arguments import PROGRAM
from compat.lmdeploy.configs import EngineConfigBase, GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig
from compat.lmdeploy.tables import BY_SAMPLING, GENERATION, PYTORCH, SAMPLING, TURBOMIND

DEFAULT_NEW_TOKENS = 512


def engine_config(given: EngineConfigBase | None, fields: Mapping[str, Any]) -> EngineConfig:
    """`fields`: further ones, which pipeline takes as keywords. Raises TypeError, NotHere, ParameterError and ConfigError."""
    if given is not None and not isinstance(given, TurbomindEngineConfig | PytorchEngineConfig):
        raise TypeError(
            f"backend_config is a {type(given).__name__}, a TurbomindEngineConfig or a PytorchEngineConfig is needed"
        )
    table = PYTORCH if isinstance(given, PytorchEngineConfig) else TURBOMIND
    settings = _settings(table, {**({} if given is None else given.given()), **fields})
    tree = msgspec.to_builtins(PROGRAM)
    put(settings, tree)
    tree["lora"]["enabled"] = bool(tree["lora"]["adapters"])
    try:
        made = msgspec.convert(tree, EngineConfig)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`")
        raise ParameterError(f"{key}: {error}"[:300] + "; docs/configuration.md says what it can be") from None
    check_config(made)
    return made


def sampling_params(given: GenerationConfig | None) -> SamplingParams:
    """Raises TypeError, NotHere and ParameterError."""
    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(f"gen_config is a {type(given).__name__}, a GenerationConfig is needed")
    config = given or GenerationConfig()
    given_fields = config.given()
    _settings(GENERATION, given_fields)
    fields: dict[str, Any] = {
        SAMPLING[key]: value for key, value in given_fields.items() if key in SAMPLING and value is not None
    }
    fields.setdefault("max_tokens", DEFAULT_NEW_TOKENS)
    if config.do_sample:
        own = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
        fields = {**own, **fields}
        fields.setdefault("seed", secrets.randbits(63))
        fields["top_k"] = fields["top_k"] or None
    else:
        for name in BY_SAMPLING:
            fields.pop(name, None)
    fields |= _logits(config.output_logits) | {"guided_decoding": _guide(config.response_format)}
    return SamplingParams(**fields)


def _settings(table: ForeignTable, given: Mapping[str, Any]) -> dict[str, Setting]:
    try:
        return table.check(given).settings
    except UnknownParameter as error:
        raise TypeError(error.message) from None
    except RefusedParameter as error:
        raise NotHere(error.message) from None


def _logits(wanted: str | None) -> dict[str, bool]:
    if wanted not in (None, "generation", "all"):
        raise ParameterError(f"output_logits is {wanted!r}"[:100] + "; it is 'generation', 'all' or None")
    return {"return_generation_logits": wanted is not None, "return_context_logits": wanted == "all"}


def _guide(given: Any) -> GuidedDecodingParams | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return GuidedDecodingParams(json_object=True)
        case "regex_schema" if isinstance(given.get("regex_schema"), str):
            return GuidedDecodingParams(regex=given["regex_schema"])
        case "json_schema" if isinstance(given.get("json_schema"), Mapping):
            outer = given["json_schema"]
            return GuidedDecodingParams(json=dict(outer.get("schema", outer)))
    raise ParameterError(
        f"response_format is {given!r}"[:200] + "; it is {'type': 'json_schema', 'json_schema': {...}}, "
        "{'type': 'regex_schema', 'regex_schema': '...'} or {'type': 'json_object'}"
    )
