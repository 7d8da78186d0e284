"""Compares the sizes that a config.json names with the shapes in the headers of the weights, before memory is taken for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig

_REMEDY = "correct it, or fetch the checkpoint again"


def check_layers(config: ModelConfig, names: Collection[str]) -> None:
    """Raise ConfigError if config.json names more layers than there are tensors (`names`) for."""
    layer = re.compile(re.escape(config.names.layers) + r"(\d+)\.")
    found = {match[1] for name in names if (match := layer.match(name))}
    if config.num_layers > len(found):
        raise ConfigError(
            f"{FILE}: num_hidden_layers is {config.num_layers}, the checkpoint has tensors of {len(found)} layers; {_REMEDY}"
        )


def check_sizes(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError where layers, vocabulary, hidden or intermediate size are not those of the tensors.

    The names of a checkpoint of the layers alone lack `model.`. A tensor that is not there, or is packed, is left to the loader.
    """
    names = config.names
    is_bare = not any(name.startswith(names.layers) for name in shapes)
    prefix = "model." if is_bare else ""
    check_layers(config, [prefix + name for name in shapes])
    embedding = shapes.get(f"{names.embedding.removeprefix(prefix)}.weight")
    sizes = (("vocab_size", config.vocab_size), ("hidden_size", config.hidden_size))
    for (name, size), given in zip(sizes, embedding or (), strict=False):
        if size != given:
            raise ConfigError(f"{FILE}: {name} is {size}, the checkpoint's embedding has {given}; {_REMEDY}")
    norm = shapes.get(f"{names.norm.removeprefix(prefix)}.weight")
    if norm is not None and list(norm) != [config.hidden_size]:
        raise ConfigError(
            f"{FILE}: hidden_size is {config.hidden_size}, the checkpoint's last norm has {list(norm)}; {_REMEDY}"
        )
    most = max((side for shape in shapes.values() for side in shape), default=0)
    for name, size in (("intermediate_size", config.intermediate_size), ("head_dim", config.head_dim)):
        if size > most * 8:  # a packed tensor holds up to eight values in one
            raise ConfigError(
                f"{FILE}: {name} is {size}, no tensor of the checkpoint has so many rows or columns; {_REMEDY}"
            )


def check_hosted_sizes(content: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare config.json with the tensors of a model that transformers runs, of which only the number and the sizes are known
    here."""
    text = content.get("text_config")
    content = text if isinstance(text, dict) else content
    total = 8 * sum(map(prod, shapes.values()))  # a packed tensor holds up to eight values in one
    number = {name: content[name] for name in ("vocab_size", "hidden_size") if isinstance(content.get(name), int)}
    if prod(number.values()) > total:
        given = ", ".join(f"{name} {value}" for name, value in number.items())
        raise ConfigError(f"{FILE}: {given} are more than the checkpoint's {total // 8:,} values can hold; {_REMEDY}")
    layers = content.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(shapes):
        raise ConfigError(f"{FILE}: num_hidden_layers is {layers}, the checkpoint has {len(shapes)} tensors; {_REMEDY}")
