"""Debug tensors: inputs and outputs of whole steps, for a program that looks at what the model is given and gives.

    input_ids                      int32 [tokens]          the flat batch, row after row without padding
    position_ids                   int32 [tokens]
    sequence_length                int32 [rows]            tokens of each row behind this step, those in the cache included
    host_past_key_value_lengths    int32 [rows]            of these, in the cache before it
    slots                          int32 [rows]
    block_tables                   int32 [rows, blocks]    of the longest row; what lies behind a shorter row's end means nothing
    logits                         float32 [rows that sample, vocab], before penalties and post-processors
    any of model.additional_outputs                        float32 [rows that sample, width]

The names are TensorRT-LLM's where it has the tensor. A step in which no row samples has inputs only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from backend.api.config.schema import DEBUG_INPUTS, EngineConfig
from backend.api.errors import ConfigError
from backend.api.tensor import TensorData
from backend.core.gathered import LOGITS
from backend.core.step import Row
from backend.worker.input_batch import InputBatch
from kernels.common.transfer import Fetched

log = logging.getLogger("everbatch.worker")


class DebugFetch:
    def __init__(self, names: tuple[str, ...], max_bytes: int) -> None:
        """`max_bytes`: of the tensors of one step."""
        self._inputs = [name for name in names if name in DEBUG_INPUTS]
        self.outputs = [name for name in names if name not in DEBUG_INPUTS]
        self._max_bytes = max_bytes
        self._logged: set[str] = set()  # tensors whose loss has been logged

    @classmethod
    def of(cls, config: EngineConfig) -> DebugFetch | None:
        """None when no step's tensors are kept. Raises ConfigError for a tensor that there is not."""
        names = tuple(dict.fromkeys(config.records.debug_tensors))
        known = (*DEBUG_INPUTS, LOGITS, *config.model.additional_outputs)
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"records.debug_tensors has {name!r}; there are {', '.join(dict.fromkeys(known))}, and other outputs of the "
                    f"model once model.additional_outputs names them"
                )
        if not (names and config.records.max_debug_iterations):
            return None
        return cls(names, config.limits.max_tensor_bytes)

    def begin(self, rows: list[Row], batch: InputBatch, outputs: Mapping[str, Tensor]) -> FetchedTensors:
        """Begin to fetch a step's tensors. `rows`: all of the step; outputs [rows that sample, width], none if no row does."""
        tensors = self._of_inputs(rows, batch) if self._inputs else {}
        tensors |= {name: outputs[name].float() for name in self.outputs if name in outputs}
        kept: dict[str, Tensor] = {}
        left = self._max_bytes
        for name, tensor in tensors.items():
            num_bytes = tensor.nbytes
            if num_bytes <= left:
                kept[name], left = tensor, left - num_bytes
            elif name not in self._logged:
                self._logged.add(name)
                log.warning(
                    "debug tensor %s takes %d bytes and was dropped: a step has room for %d (limits.max_tensor_bytes), %d of "
                    "them left; this is logged once",
                    name,
                    num_bytes,
                    self._max_bytes,
                    left,
                )
        return FetchedTensors(kept)

    def _of_inputs(self, rows: list[Row], batch: InputBatch) -> dict[str, Tensor]:
        flat = batch.flatten(rows, [0] * len(rows))
        numbers = np.array([(row.num_computed + row.num_tokens, row.num_computed, row.slot) for row in rows])
        lengths, past, slots = torch.from_numpy(numbers.T.copy())
        tables = torch.from_numpy(flat.rows.tables)
        made = dict(zip(DEBUG_INPUTS, (flat.token_ids, flat.positions, lengths, past, slots, tables), strict=True))
        device = flat.token_ids.device
        return {name: made[name].to(device, torch.int32) for name in self._inputs}


class FetchedTensors:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        self._fetched = Fetched(*tensors.values()) if tensors else None

    def wait(self) -> dict[str, TensorData]:
        if self._fetched is None:
            return {}
        return {name: _as_data(tensor) for name, tensor in zip(self._names, self._fetched.wait(), strict=True)}


def _as_data(tensor: Tensor) -> TensorData:
    return TensorData(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.contiguous().numpy().tobytes()
    )
