"""The checkpoint that all servers serve: a directory, the default model, or a shape of random weights."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness.called_from import from_caller
from benchmarks.peers import commands, models
from benchmarks.peers.environments import BENCH
from deploy import ROOT
from deploy.errors import UserError
from deploy.progress import SteppedProgress

DEFAULT = ROOT / "models" / "default"


def most_tokens(text: str) -> int:
    """Of one sequence, by the config.json of a shape or a directory, before anything is made. Raises UserError."""
    if text in models.SHAPES:
        from tools.make_random_model import SHAPES  # here, because it loads torch

        return int(SHAPES[text]["max_position_embeddings"])
    return directory_of(text).max_length


def directory_of(text: str) -> models.Model:
    """A checkpoint that lies in a directory. Raises UserError."""
    model = models.of_directory(from_caller(Path(text)) if text else DEFAULT)
    if not isinstance(model.config.get("max_position_embeddings"), int):
        raise UserError(f"{model.directory / 'config.json'} has no max_position_embeddings")
    return model


def model_of(text: str, progress: SteppedProgress) -> models.Model:
    """A shape's files are made once. Raises UserError, CommandFailed."""
    if text not in models.SHAPES:
        model = directory_of(text)
        if not (model.directory / "tokenizer.json").is_file():
            raise UserError(f"{model.directory} has no tokenizer.json; servers need one")
        return model
    directory = BENCH / "models" / f"{text}-served"
    if not (directory / "tokenizer.json").exists():
        command = models.make_command(text, directory, DEFAULT)
        commands.run(command, progress, f"making the {text} shape of random weights (once)")
        give_every_token_a_text(directory)
    return models.of_directory(directory)


def give_every_token_a_text(directory: Path) -> None:
    """Lengthen a borrowed tokenizer to the model's vocabulary: a token without a text would not be seen on the wire."""
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"Ġw{place}": place for place in range(max(vocabulary.values()) + 1, size)}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))
