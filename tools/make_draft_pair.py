#!/usr/bin/env python3
"""Write a model and a draft model for it, both of random weights, which agree as much as one likes.

    .venv/bin/python -m tools.make_draft_pair DIR --shape M --draft-layers 3 --epsilon 0.02

DIR/draft has the first layers of DIR/model, and its embedding, last norm and output head. What the other layers of the model add
to its residual stream is multiplied by epsilon (the weights of o_proj and down_proj are). With 0 the two compute the same; the
greater it is, the more often their likeliest tokens differ. Time and memory of the model are those of its shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tools.make_random_model import (
    FAMILIES,
    SHAPE_HELP,
    SHAPES,
    make_config,
    random_weights,
    read_overrides,
    write_model,
)

_INTO_THE_STREAM = ("self_attn.o_proj.weight", "self_attn.o_proj.bias", "mlp.down_proj.weight", "mlp.down_proj.bias")


def make_draft_pair(
    directory: str | Path,
    num_draft_layers: int,
    epsilon: float,
    family: str = "llama",
    seed: int = 0,
    shape: str | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Returns the directories of the model and of the draft model, which stand in `directory`.

    The rest as in make_random_model. ValueError where the model has no layers besides those of the draft model.
    """
    model, draft = Path(directory) / "model", Path(directory) / "draft"
    config = make_config(family, shape, overrides)
    if not 0 < num_draft_layers < config.num_hidden_layers:
        raise ValueError(
            f"the draft model is to have {num_draft_layers} layers; use 1 to {config.num_hidden_layers - 1}, for the model has "
            f"{config.num_hidden_layers}"
        )
    weights = random_weights(config, seed)
    kept = {name: weight for name, weight in weights.items() if _layer(name) < num_draft_layers}
    write_model(draft, make_config(family, shape, overrides | {"num_hidden_layers": num_draft_layers}), kept)
    for name, weight in weights.items():
        if name not in kept and name.endswith(_INTO_THE_STREAM):
            weight.mul_(epsilon)
    write_model(model, config, weights)
    return model, draft


def _layer(name: str) -> int:
    """-1 for a tensor of no layer."""
    _, _, within = name.partition("layers.")
    return int(within.partition(".")[0]) if within else -1


def main(
    directory: Path,
    draft_layers: Annotated[int, typer.Option()],
    epsilon: Annotated[float, typer.Option(help="of what the other layers add")],
    family: Annotated[Literal[tuple(FAMILIES)], typer.Option()] = "llama",  # type: ignore[valid-type]
    shape: Annotated[Literal[tuple(SHAPES)] | None, typer.Option(help=SHAPE_HELP)] = None,  # type: ignore[valid-type]
    seed: int = 0,
    set: Annotated[list[str] | None, typer.Option(metavar="KEY=JSON", help="a key of config.json")] = None,
) -> None:
    """Write a model of random weights, and a draft model that agrees with it."""
    make_draft_pair(directory, draft_layers, epsilon, family, seed, shape, **read_overrides(set or []))


if __name__ == "__main__":
    typer.run(main)
