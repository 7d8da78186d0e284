"""Set-up of the python-based backend `vllm` (deploy/backends/vllm): upstream's models bring a 1/model.json with
engine arguments, and a config.pbtxt without tensors.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

from backend.serving.assembly import load_model, run_directory_of
from backend.serving.lifecycle.environment import engine_config
from backend.serving.server import ModelServer
from backend.serving.tensors import Input, Output
from backend.serving.wires.vllm import TENSORS
from backend.serving.wires.vllm_engine_args import read_engine_args, remarks

log = logging.getLogger("everbatch.serving")


class CompletedConfig(Protocol):
    """The part of Triton's ModelConfig that is used here."""

    def as_dict(self) -> dict[str, Any]: ...

    def add_input(self, tensor: dict[str, Any]) -> None: ...

    def add_output(self, tensor: dict[str, Any]) -> None: ...

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None: ...

    def set_max_batch_size(self, size: int) -> None: ...


def load_vllm_model(args: dict[str, str]) -> ModelServer:
    """Serve a model of the backend. Raises ConfigError for a model.json that cannot be read or holds an unknown argument."""
    engine_args = read_engine_args(Path(args["model_repository"], args["model_version"], "model.json"))
    server = load_model(args)
    config = engine_config(run_directory_of(json.loads(args["model_config"])))
    for remark in remarks(engine_args, config.model.path):
        log.warning("model.json of %s: %s", args["model_name"], remark)
    return server


def complete_config(config: CompletedConfig) -> CompletedConfig:
    """Add the tensors that a config.pbtxt does not name, and what the wire prescribes besides. What it names stays."""
    given = config.as_dict()
    names = {tensor["name"] for kind in ("input", "output") for tensor in given.get(kind, [])}
    for declared in TENSORS.inputs:
        if declared.name not in names:
            config.add_input(_described(declared) | {"optional": declared.optional})
    for output in TENSORS.outputs:
        if output.name not in names:
            config.add_output(_described(output))
    config.set_model_transaction_policy({"decoupled": True})
    config.set_max_batch_size(TENSORS.max_batch_size)
    return config


def _described(spec: Input | Output) -> dict[str, Any]:
    return {"name": spec.name, "data_type": f"TYPE_{spec.dtype}", "dims": list(spec.dims)}
