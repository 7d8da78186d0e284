"""`python -m tools.draw_top [FILE]`: the picture of docs/top.md, of models/default under conversations and long requests."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from backend.api import EngineConfig, Request, Response, SamplingConfig, SessionConfig, SessionId
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.executor import Executor
from client import top

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "top.svg"
WIDTH = 118  # characters
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich's template would fetch a font from elsewhere


def draw(path: Path) -> None:
    """Run an engine for some seconds, and write what `everbatch top` shows then."""
    config = EngineConfig(kv_cache=KvCacheConfig(max_tokens=4096), scheduler=SchedulerConfig(max_batch_size=6))
    with Executor.from_directory(str(ROOT / "models" / "default"), config) as executor:
        for session in range(3):
            _answered(executor, Request(list(range(5, 155)), 60, session=SessionConfig(SessionId(session), start=True)))
        for index in range(9):
            sampling = SamplingConfig(temperature=0.8, seed=index)
            prompt = [40 + index, *range(50, 50 + 45 * (index % 4))]
            executor.submit(Request(prompt, 700, True, sampling_config=sampling, end_ids=()), lambda response: None)
        rates = top.Rates()
        time.sleep(1.0)
        rates.take(_look(executor))
        time.sleep(0.5)
        view = _look(executor)
        console = Console(record=True, width=WIDTH, file=io.StringIO())
        console.print(top.page(view, rates.take(view)))
    path.write_text(_FONT_FACE.sub("", console.export_svg(title="./everbatch top")))


def _look(executor: Executor) -> top.View:
    """As a client of the server gets it."""
    view: Any = _answered(executor, None).result.live_view
    decoded: top.View = msgspec.json.decode(msgspec.json.encode(view))
    return decoded


def _answered(executor: Executor, request: Request | None) -> Response:
    """The final response to a request, or to a look."""
    done, final = threading.Event(), []

    def hear(response: Response) -> None:
        if response.is_final:
            final.append(response)
            done.set()

    executor.look(hear) if request is None else executor.submit(request, hear)
    done.wait(60)
    return final[0]


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
