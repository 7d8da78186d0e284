"""ServedModel: the description by which a ModelServer serves one Triton model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backend.api import EngineConfig
from backend.serving.dialect import PLAIN, Dialect
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.lifecycle.environment import Health
from backend.serving.protocols import EngineClient
from backend.serving.tensors import ModelTensors
from backend.serving.work import Work

AtOnce = Callable[[Batch, EngineClient], list[Work] | None]
Check = Callable[[Batch, ServingContext], None]
Parse = Callable[[Batch, ServingContext, Parameters], list[Work]]


def not_at_once(batch: Batch, engine: EngineClient) -> list[Work] | None:
    return None


@dataclass(frozen=True)
class ServedModel:
    """How requests of one model are read and answered, and what the model takes part in.

    `parse` turns a batch into work. A model with `check_text` has text requests: `check_text` runs on the main thread, then
    `parse`, which is slow, on a text thread. `prepare` loads what parsing needs, and returns True once all of it is there; until
    then it is called four times a second.
    """

    tensors: ModelTensors
    parse: Parse
    check_text: Check | None = None
    at_once: AtOnce = (
        not_at_once  # answers on the main thread what costs nothing, also when the server is full; None: the others
    )
    prepare: Callable[[], bool] = lambda: True
    close: Callable[[], None] = lambda: None  # ends what `prepare` has started
    dialect: Dialect = PLAIN
    decoupled: bool = True
    owner: bool = False  # owns the engine, and publishes its metrics
    is_one_of_several: bool = False  # the server has several engines, each with labels of its own
    reports_vllm: bool = False  # also publishes metrics under vLLM's names
    labels: Mapping[str, str] = field(default_factory=dict)  # labels of its metrics
    drain_grace_s: float = 10.0
    parameters: Mapping[str, str] = field(default_factory=dict)  # parameters of its config.pbtxt
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters for requests: name -> PEFT directory
    away_file: Path | None = None  # says that the engine is away on purpose (absence.py); None: it never is
    reading_file: Path | None = None  # outlives the stub, and says whose texts it reads (suspects.py)
    # Makes the configuration by which requests are read of the engine's, which may come late; None: the given one holds.
    configure: Callable[[EngineConfig], EngineConfig] | None = None
    # Gets state, number of live streams and the reason of unavailability: at the start, then four times a second.
    report_health: Callable[[Health, int, str], None] = lambda state, num_live, why: None
