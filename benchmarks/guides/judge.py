"""Judges backends by schemas with instances that are known to be valid or invalid.

Each instance is tokenised as the model would write it, in both usual spacings, and fed to a matcher token by token: it is
accepted if every token is in the mask ahead of it and the output may end behind the last one. An accepted invalid instance, and
a mask that contradicts `accept`, is a defect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from backend.api.guide import Guide, GuideType
from backend.guided.protocol import CompiledGuide, GuideBackend, GuideError
from backend.guided.setup import backend_maker
from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from backend.text.tokenizer import Tokenizer

SPACINGS: tuple[tuple[str, str], ...] = ((",", ":"), (", ", ": "))


@dataclass
class Figures:
    backend: str
    num_schemas: int = 0
    refused: list[str] = field(default_factory=list)
    failed: int = 0
    num_valid: int = 0  # instances of schemas that were compiled
    num_invalid: int = 0
    rejected_valid: int = 0
    accepted_invalid: int = 0
    first_ms: list[float] = field(default_factory=list)  # from the schema to the first mask
    mask_ms: list[float] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)


def judge(name: str, directory: Path, model: str) -> Figures:
    tokenizer = Tokenizer.from_directory(model)
    info = TokenizerInfo.of_tokenizer(tokenizer)
    backend = backend_maker(name)(Vocabulary.of(info, tokenizer.num_ids))
    masks = np.zeros((1, -(-tokenizer.num_ids // 32)), dtype=np.int32)
    figures = Figures(name)
    backend.compile(Guide(GuideType.JSON)).matcher().fill(masks, 0)  # what is loaded once is not the first schema's
    for path in sorted(directory.glob("*.json")):
        case = json.loads(path.read_text())
        figures.num_schemas += 1
        try:
            compiled = _compiled(backend, case["schema"], masks, figures)
        except GuideError as error:
            figures.refused.append(f"{path.stem}: {error}")
            continue
        except Exception as error:  # a library's own failure is a figure, not the end of the benchmark
            figures.failed += 1
            figures.defects.append(f"{path.stem}: {type(error).__name__}: {error}")
            continue
        for test in case["tests"]:
            _judge_instance(figures, compiled, tokenizer, masks, path.stem, test)
    return figures


def _compiled(backend: GuideBackend, schema: Any, masks: NDArray[np.int32], figures: Figures) -> CompiledGuide:
    guide = Guide(GuideType.JSON_SCHEMA, json.dumps(schema))
    started = time.perf_counter()
    compiled = backend.compile(guide)
    compiled.matcher().fill(masks, 0)
    figures.first_ms.append(1000 * (time.perf_counter() - started))
    return compiled


def _judge_instance(
    figures: Figures,
    compiled: CompiledGuide,
    tokenizer: Tokenizer,
    masks: NDArray[np.int32],
    stem: str,
    test: dict[str, Any],
) -> None:
    accepted = [_accepts(figures, compiled, tokenizer, masks, _text(test["data"], spacing)) for spacing in SPACINGS]
    if test["valid"]:
        figures.num_valid += 1
        if not all(accepted):
            figures.rejected_valid += 1
            figures.defects.append(f"{stem}: rejects the valid instance {test['description']!r}")
    else:
        figures.num_invalid += 1
        if any(accepted):
            figures.accepted_invalid += 1
            figures.defects.append(f"{stem}: accepts the invalid instance {test['description']!r}")


def _text(data: Any, spacing: tuple[str, str]) -> str:
    return json.dumps(data, separators=spacing, ensure_ascii=False)


def _accepts(
    figures: Figures, compiled: CompiledGuide, tokenizer: Tokenizer, masks: NDArray[np.int32], text: str
) -> bool:
    matcher = compiled.matcher()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        started = time.perf_counter()
        matcher.fill(masks, 0)
        figures.mask_ms.append(1000 * (time.perf_counter() - started))
        is_in_mask = bool(masks[0, token_id >> 5] >> (token_id & 31) & 1)
        if matcher.accept(token_id) != is_in_mask:
            figures.defects.append(f"the mask and `accept` disagree about token {token_id} of {text[:60]!r}")
        if not is_in_mask:
            return False
    return matcher.is_complete


def table(figures: list[Figures]) -> Table:
    drawn = Table(title=f"{figures[0].num_schemas} schemas; times in ms: average / p50 / p99 / greatest")
    drawn.add_column("")
    for each in figures:
        drawn.add_column(each.backend, justify="right")
    rows: dict[str, Callable[[Figures], str]] = {
        "schemas refused": lambda f: str(len(f.refused)),
        "failures": lambda f: str(f.failed),
        "valid instances rejected": lambda f: f"{f.rejected_valid} of {f.num_valid}",
        "invalid instances accepted": lambda f: f"{f.accepted_invalid} of {f.num_invalid}",
        "first mask": lambda f: _spread(f.first_ms),
        "mask": lambda f: _spread(f.mask_ms),
    }
    for title, cell in rows.items():
        drawn.add_row(title, *(cell(each) for each in figures))
    return drawn


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    mean, p50, p99, top = np.mean(values), np.median(values), np.quantile(values, 0.99), max(values)
    return f"{mean:.3f} / {p50:.3f} / {p99:.3f} / {top:.1f}"
