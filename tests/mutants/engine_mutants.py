"""Bugs planted in batching, priorities and retention; those of the cache and the scheduler's plans are in tests/simulation."""

from __future__ import annotations

from backend.api.request import Request
from backend.core import sequence
from backend.core.sequence import TRANSITIONS, Event, Status
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.engine.publish import Interval
from backend.engine.response_buffer import ResponseBuffer
