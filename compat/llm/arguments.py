"""The keyword arguments of one LLM, checked against the table of parameters.py, and the configuration that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backend.api import EngineConfig
from backend.api.config.checks import check_config
from backend.api.config.schema import KvCacheConfig, LimitsConfig, ModelConfigSection
from backend.api.foreign import RefusedParameter, Setting, UnknownParameter, put
from compat.config_object import ConfigObject
from compat.llm.errors import NotHere, ParameterError
from compat.llm.parameters import ARGUMENTS, OPEN, SECTIONS
from compat.llm.postprocessing import PostprocWorkerConfig
from compat.llm.speculative import speculation_fields

# argument that LLM uses itself -> default
OWN: dict[str, Any] = {
    "max_input_len": None,
    "max_beam_width": None,
    "enable_tqdm": False,
    "stream_interval": 1,
    "num_postprocess_workers": 0,
    "postprocess_tokenizer_dir": None,
    "return_perf_metrics": False,
    "batched_logits_processor": None,
    "orchestrator_type": None,
    "engine_config": None,
}


class LlmArguments:
    """The arguments of one LLM, checked. `config` is the engine's."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Raises TypeError for an unknown argument, NotHere and ParameterError for a value, ConfigError for the engine's."""
        speculation = speculation_fields(given.get("speculative_config"))
        flat = _flat(given)
        checked = _checked(flat)
        own = {**OWN, **_of_build_config(flat), **given}
        self.max_input_len: int | None = own["max_input_len"]
        self.max_beam_width: int | None = own["max_beam_width"]
        self.shows_progress: bool = own["enable_tqdm"]
        self.stream_interval = _at_least_one("stream_interval", own["stream_interval"])
        self.returns_metrics: bool = own["return_perf_metrics"]
        self.postprocess = PostprocWorkerConfig(own["num_postprocess_workers"], own["postprocess_tokenizer_dir"])
        self.batched_logits_processor: Any = own["batched_logits_processor"]
        orchestrator = _orchestrator(own["orchestrator_type"])
        base = _with_ray(_base(own["engine_config"]), orchestrator)
        self.config = _config(base, given, checked, speculation)
        self.has_own_process = orchestrator is not None or self.config.workers.has_replicas


def _checked(flat: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings that the arguments make. Raises TypeError for an unknown one, NotHere for a value that is not served."""
    try:
        return ARGUMENTS.check(flat).settings
    except UnknownParameter as error:
        raise TypeError(error.message) from None
    except RefusedParameter as error:
        raise NotHere(error.message) from None


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the fields of configuration objects beside them, as `kv_cache_config.max_tokens`."""
    flat = dict(given)
    for name, value in given.items():
        if isinstance(value, ConfigObject) and value.refused:
            raise NotHere(f"{name} is a {type(value).__name__}, which this version does not serve: {value.refused}")
        if name in SECTIONS and value is not None and not isinstance(value, KvCacheConfig):
            flat |= _flat({f"{name}.{field}": each for field, each in _fields(name, value).items()})
    return flat


def _fields(name: str, value: Any) -> dict[str, Any]:
    """The fields of a dictionary, or those that an object of configs.py was given.

    An object may be from another package: only its known fields are read. Raises TypeError for a number, a text or a list.
    """
    if isinstance(value, ConfigObject):
        return value.given()
    if isinstance(value, str | bytes | int | float | Sequence):
        raise TypeError(f"{name} is a {type(value).__name__}, an object or a dictionary with its fields is needed")
    known = [each.key.removeprefix(f"{name}.") for each in ARGUMENTS if each.key.startswith(f"{name}.")]
    if not isinstance(value, Mapping):
        return {field: getattr(value, field) for field in known if hasattr(value, field)}
    return {field: each for field, each in value.items() if field in known or name not in OPEN}


def _of_build_config(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that a BuildConfig sets in place of arguments of LLM."""
    found = {name: flat.get(f"build_config.{name}") for name in ("max_input_len", "max_beam_width")}
    return {name: value for name, value in found.items() if value is not None}


def _orchestrator(given: str | None) -> str | None:
    if given not in (None, "rpc", "ray"):
        raise NotHere(
            f"orchestrator_type is {given!r}; 'rpc' gives the engine a process of its own, 'ray' an actor in a Ray cluster, "
            f"None neither"
        )
    return given


def _with_ray(config: EngineConfig, orchestrator: str | None) -> EngineConfig:
    if orchestrator != "ray":
        return config
    return msgspec.structs.replace(config, workers=msgspec.structs.replace(config.workers, orchestrator="ray"))


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ParameterError(f"{name} is {value}, at least 1 is needed")
    return value


def _base(config: EngineConfig | None) -> EngineConfig:
    if config is not None and not isinstance(config, EngineConfig):
        raise TypeError(f"engine_config is a {type(config).__name__}, a backend.api.EngineConfig is needed")
    return config or PROGRAM


def _config(
    config: EngineConfig, given: Mapping[str, Any], settings: Mapping[str, Setting], speculation: Mapping[str, Any]
) -> EngineConfig:
    """The engine's configuration with what the arguments change."""
    tree = msgspec.to_builtins(config)
    if isinstance(given.get("kv_cache_config"), KvCacheConfig):
        tree["kv_cache"] = msgspec.to_builtins(given["kv_cache_config"])
    put(settings, tree)
    tree["speculation"] |= speculation
    try:
        changed = msgspec.convert(tree, EngineConfig)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`")
        section, _, field = key.partition(".")
        value = tree.get(section, {}).get(field)
        raise ParameterError(f"{key} would be {value!r}; docs/configuration.md says what it can be") from None
    check_config(changed)
    return changed


# The configuration of an engine that serves one Python program. Any number of prompts may wait for any time, and each may ask for
# logits. A program is a single client: its requests share KV token by token, and results report reuse.
PROGRAM = EngineConfig(
    model=ModelConfigSection(gather_context_logits=True, gather_generation_logits=True),
    kv_cache=KvCacheConfig(sharing="all"),
    limits=LimitsConfig(max_queue_size=1 << 31, max_queued_tokens=1 << 48, default_timeout_s=1e9),
)


def with_model(config: EngineConfig, model: Any) -> EngineConfig:
    """The configuration with another checkpoint; None keeps the one that it names."""
    return config if model is None else with_model_fields(config, path=str(model))


def with_model_fields(config: EngineConfig, **fields: Any) -> EngineConfig:
    """The configuration with other fields of its section `model`."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **fields))
