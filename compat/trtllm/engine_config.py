"""The EngineConfig of an ExecutorConfig, by the table of parameters.py and by the rules over several attributes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from backend.api import ConfigError
from backend.api.config.file import checked_config
from backend.api.config.ranges import MAX_SECONDS
from backend.api.config.schema import DEBUG_INPUTS, EngineConfig
from backend.api.foreign import RANKS_KEY, RefusedParameter, Setting, put, ranks_of_stage
from backend.core.gathered import LOGITS
from compat.trtllm.configs import ExecutorConfig, ParallelConfig
from compat.trtllm.enums import BatchingType, CommunicationMode
from compat.trtllm.parameters import ANY_NUMBER, ATTRIBUTES

BASE = "engine_config"  # an extra attribute of ExecutorConfig: an EngineConfig, for keys that the bindings have no name for
_KEY = re.compile(rf"\b({'|'.join(EngineConfig.__struct_fields__)})\.[a-z_]+")


def _debug_tensors(config: ExecutorConfig) -> tuple[str, ...]:
    """The names of the tensors to keep. Without names: all inputs, all outputs, or both."""
    debug = config.debug_config
    if debug is None:
        return ()
    inputs = DEBUG_INPUTS if debug.debug_input_tensors else ()
    additional = [each.name for each in config.additional_model_outputs or ()]
    outputs = dict.fromkeys((LOGITS, *additional)) if debug.debug_output_tensors else ()
    return tuple(debug.debug_tensor_names) or (*inputs, *outputs)


def _max_debug_iterations(config: ExecutorConfig) -> int:
    return config.debug_config.debug_tensors_max_iterations if config.debug_config and _debug_tensors(config) else 0


# key of EngineConfig -> its value, whatever the ExecutorConfig says
_FIXED: dict[str, Any] = {
    "kv_cache.sharing": "all",  # One program owns the engine: all its requests share KV per token, as in TensorRT-LLM.
    "model.gather_context_logits": True,  # No logits are kept unless a request asks for them.
    "model.gather_generation_logits": True,
    "limits.max_queued_tokens": ANY_NUMBER,
    "limits.default_timeout_s": MAX_SECONDS,  # no deadline, unless a request has one
    "limits.max_timeout_s": MAX_SECONDS,
    "limits.max_words": 65536,
    "limits.max_word_tokens": 65536,
    "limits.max_logit_bias": 1 << 20,
}
# key of EngineConfig -> its value, made of several attributes of the ExecutorConfig
_MADE: dict[str, Callable[[ExecutorConfig], Any]] = {
    "records.max_debug_iterations": _max_debug_iterations,
    "records.debug_tensors": _debug_tensors,
}
# key of EngineConfig -> the attribute of ExecutorConfig that an error names
_NAMES = {attribute.target: attribute.key for attribute in ATTRIBUTES if attribute.target} | {
    "records.max_debug_iterations": "debug_config.debug_tensors_max_iterations"
}


def engine_config(config: ExecutorConfig) -> EngineConfig:
    """The engine's configuration. Raises RuntimeError for what is not served, with the name, the value and the remedy."""
    _check_combinations(config)
    base = config.__dict__.get(BASE, EngineConfig())
    if not isinstance(base, EngineConfig):
        raise TypeError(f"ExecutorConfig.{BASE} is a {type(base).__name__}, a backend.api.EngineConfig is needed")
    values = {key: Setting(BASE, value) for key, value in _FIXED.items()}
    values |= {key: Setting(BASE, make(config)) for key, make in _MADE.items()}
    tree, checked = msgspec.to_builtins(base), _checked(config)
    try:
        if (ranks := checked.get(RANKS_KEY)) is not None:
            checked[RANKS_KEY] = ranks._replace(value=ranks_of_stage(ranks, base.workers.pipeline_parallel_size))
    except ConfigError as error:
        raise RuntimeError(_in_their_words(str(error))) from None
    put(values | checked, tree)
    if config.max_batch_size is None:  # every row needs a token of each step
        tree["scheduler"]["max_batch_size"] = min(base.scheduler.max_batch_size, tree["scheduler"]["max_num_tokens"])
    try:
        return checked_config(tree)
    except ConfigError as error:
        raise RuntimeError(_in_their_words(str(error))) from None


def _checked(config: ExecutorConfig) -> dict[str, Setting]:
    """The settings that the attributes make. Raises RuntimeError for a value that is not served."""
    try:
        return ATTRIBUTES.check({each.key: _at(config, each.key) for each in ATTRIBUTES}).settings
    except RefusedParameter as error:
        raise RuntimeError(error.message) from None


def _in_their_words(error: str) -> str:
    """An error of the configuration with attributes of ExecutorConfig in place of keys, and without the hint at --set."""
    text = error.removeprefix("configuration: ").partition("; change it with --set")[0]
    return _KEY.sub(lambda found: f"ExecutorConfig.{_NAMES.get(found[0], f'{BASE}.{found[0]}')}", text)


def runs_in_own_process(parallel: ParallelConfig | None) -> bool:
    """True if the engine shall run in a process of its own. Raises RuntimeError for several devices."""
    if parallel is None:
        return False
    if parallel.device_ids is not None and len(parallel.device_ids) > 1:
        what = "several ranks run on CPUs only; give one id, or participant_ids in its place"
        raise _refusal("parallel_config.device_ids", parallel.device_ids, what)
    if parallel.communication_mode is CommunicationMode.LEADER:
        return False
    orchestrator = parallel.orchestrator_config
    if orchestrator is not None and not orchestrator.is_orchestrator:
        what = "parallel_config.orchestrator_config.is_orchestrator"
        raise _refusal(what, False, "the Executor starts its own engine process; run the orchestrator only")
    if orchestrator is not None and not orchestrator.spawn_processes:
        what = "parallel_config.orchestrator_config.spawn_processes"
        raise _refusal(what, False, "the Executor starts its own engine process; leave it out")
    return True


def _check_combinations(config: ExecutorConfig) -> None:
    if _debug_tensors(config) and _max_debug_iterations(config) < 1:
        what = "debug_config.debug_tensors_max_iterations"
        remedy = "tensors are kept for the latest iterations, not written to files; give 1 or more"
        raise _refusal(what, _max_debug_iterations(config), remedy)
    if config.batching_type is BatchingType.STATIC and config.logits_post_processor_config is not None:
        raise _refusal(
            "logits_post_processor_config", "given", "they do not run with BatchingType.STATIC; use INFLIGHT"
        )


def _at(config: ExecutorConfig, path: str) -> Any:
    """The value at a dotted path; None where one of the records on the way is None."""
    value: Any = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _refusal(name: str, value: object, remedy: str) -> RuntimeError:
    return RuntimeError(f"ExecutorConfig.{name} is {value}, which this version does not serve: {remedy}")
