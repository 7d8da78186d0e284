"""The enumerations of TensorRT-LLM's executor bindings.

As in pybind11, members convert to int and compare with members of the same enumeration only.
"""

from __future__ import annotations

import enum


class Enumeration(enum.Enum):
    """A member can be made of its number, and `int(member)` gives it back."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


class ModelType(Enumeration):
    """The architecture of a model. Only DECODER_ONLY is served."""

    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(Enumeration):
    """STATIC: a batch runs in lockstep until all of it has ended. INFLIGHT: requests join and leave at every iteration."""

    STATIC = 0
    INFLIGHT = 1


class CapacitySchedulerPolicy(Enumeration):
    """The policy that admits requests. MAX_UTILIZATION may pause and resume them, GUARANTEED_NO_EVICT never does."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(Enumeration):
    """How long prompts share an iteration."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class CommunicationType(Enumeration):
    """How ranks talk to each other."""

    MPI = 0


class CommunicationMode(Enumeration):
    """LEADER: the engine runs in this process. ORCHESTRATOR: the Executor starts a process for the engine."""

    LEADER = 0
    ORCHESTRATOR = 1


class RequestType(Enumeration):
    """Which phases a request runs on this engine."""

    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class FinishReason(Enumeration):
    """Why a sequence ended."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class RequestStage(Enumeration):
    """How far a request is."""

    QUEUED = 0
    ENCODER_IN_PROGRESS = 1
    CONTEXT_IN_PROGRESS = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_COMPLETE = 4


class KvCacheTransferMode(Enumeration):
    """Where retained blocks go. Only DRAM, which here means that they stay where they are."""

    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2
