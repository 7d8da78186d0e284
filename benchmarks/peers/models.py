"""The measured checkpoints: shapes made by seed or any directory, their sizes, and their forms for engines that want their own.

What is made is kept under .run/bench: models/NAME and forms/NAME-KEY, the key being that of the checkpoint's files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.api.checkpoint.gguf import gguf_file, read_header
from backend.api.checkpoint.gguf_parts import model_name, parts_of
from backend.api.errors import ConfigError
from backend.architectures.description import Experts
from backend.architectures.gguf.held import EMBEDDING
from backend.models.config import of_object
from backend.models.gguf import raw_config
from benchmarks.peers import commands
from benchmarks.peers.engines import FILE, EngineSpec
from benchmarks.peers.environments import BENCH
from benchmarks.peers.errors import Skipped
from deploy import ROOT
from deploy.errors import UserError
from deploy.progress import SteppedProgress

SHAPES = {
    "S": "llama",
    "M": "llama",
    "M-long": "llama",
    "L": "llama",
    "E": "qwen3_moe",
}  # of tools/make_random_model.py
BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}  # bytes of one weight, without scales
# what optimum exports -> its options. The CPU plug-in turns fp16 weights into bf16 as it loads; a group of 128 that does not
# divide a row is made smaller.
_GROUPS = ("--weight-format", "int4", "--group-size", "128", "--group-size-fallback", "adjust")
OPENVINO_FORMS = {
    "bf16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4-asym": _GROUPS,
    "int4-sym": (*_GROUPS, "--sym"),
}
# Types of GGUF files that are written from a checkpoint -> options of `./everbatch convert`; others are quantised from the first
# one. Without a tokenizer token ids come out as well. With one llama.cpp's server can write tokens; no text goes in, so that its
# words may be any.
GGUF_WRITTEN = {
    "bf16": ("--type", "BF16", "--tokenizer", "none"),
    "q8_0": ("--type", "Q8_0", "--tokenizer", "none"),
    "bf16-vocabulary": ("--type", "BF16", "--tokenizer", "default"),
}
_KV_BYTES = 2  # bytes of one number in the KV that the roof counts


@dataclass(frozen=True)
class Model:
    """A Hugging Face checkpoint directory of a Llama shape, or with a mixture of experts, and its config.json."""

    name: str
    directory: Path
    config: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    @property
    def max_length(self) -> int:
        """The most tokens that one sequence may have."""
        return self.config["max_position_embeddings"]

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @property
    def num_kv_heads(self) -> int:
        return self.config.get("num_key_value_heads") or self.config["num_attention_heads"]

    @property
    def experts(self) -> Experts | None:
        """Raises ConfigError for a mixture that is not served."""
        is_mixture = any(self.config.get(key) for key in ("num_experts_per_tok", "moe_k"))
        return of_object(self.config).experts if is_mixture else None

    @property
    def linear_weights(self) -> int:
        """Numbers of all linear layers and the output head, not of the embedding."""
        return round(self._weights(1.0))

    def read_weights(self, tokens: int) -> float:
        """Those that a decode step of so many tokens reads: not all experts."""
        return self._weights(1.0 if (experts := self.experts) is None else experts_read(experts, tokens))

    def _weights(self, share: float) -> float:
        """share: of the experts."""
        config, experts, with_experts, mixture = self.config, self.experts, 0, 0.0
        hidden, inter, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        if experts is not None:
            with_experts = sum(layer.has_experts for layer in of_object(config).layers)
            mixture = hidden * (3 * experts.intermediate * experts.count * share + 3 * experts.shared + experts.count)
        attention = hidden * self.head_dim * (2 * heads + 2 * self.num_kv_heads)
        layers = config["num_hidden_layers"]
        mlps = 3 * hidden * inter * (layers - with_experts) + mixture * with_experts
        return layers * attention + mlps + self.vocab_size * hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config["num_hidden_layers"] * 2 * self.num_kv_heads * self.head_dim * _KV_BYTES

    def step_bytes(self, weights: str, concurrency: int, mean_length: float) -> float:
        """What a decode step must read: the weights once and the KV of every sequence (in two bytes a number)."""
        kv = concurrency * mean_length * self.kv_bytes_per_token
        return self.read_weights(concurrency) * BYTES[weights] + kv

    @property
    def files(self) -> list[Path]:
        """What the weights are read from."""
        return sorted(self.directory.glob("*.safetensors")) + [self.directory / "config.json"]

    def resident_bytes(self, weights: str) -> int:
        """Bytes of the weights in memory, an embedding of its own included."""
        embedding = 0 if self.config.get("tie_word_embeddings") else self.vocab_size * self.config["hidden_size"]
        return int(self.linear_weights * BYTES[weights] + embedding * BYTES["bf16"])


@dataclass(frozen=True)
class GgufModel(Model):
    """A GGUF file, which every engine reads as it is. `read_bytes`: of the tensors that a decode step reads, `expert_bytes`: of
    those of experts, of which it reads some.
    """

    read_bytes: int = 0
    expert_bytes: int = 0

    @property
    def files(self) -> list[Path]:
        return list(parts_of(self.directory))

    def step_bytes(self, weights: str, concurrency: int, mean_length: float) -> float:
        share = 0.0 if (experts := self.experts) is None else experts_read(experts, concurrency)
        return self.read_bytes + share * self.expert_bytes + concurrency * mean_length * self.kv_bytes_per_token

    def resident_bytes(self, weights: str) -> int:
        return sum(part.stat().st_size for part in parts_of(self.directory))


def of_file(file: Path) -> Model:
    """Raises UserError for a file that is not served. A step reads all tensors, but of an embedding of its own a few rows."""
    try:
        header = read_header(file)
        config = raw_config(header)
    except ConfigError as error:
        raise UserError(str(error)) from None
    is_tied = config["tie_word_embeddings"]
    read = sum(place.num_bytes for name, place in header.tensors.items() if is_tied or name != EMBEDDING)
    of_experts = sum(place.num_bytes for name, place in header.tensors.items() if "_exps." in name)
    return GgufModel(model_name(file.name), file.absolute(), config, read - of_experts, of_experts)


def experts_read(experts: Experts, tokens: int) -> float:
    """The share of a layer's experts that so many tokens together have, each at random."""
    return float(1 - (1 - experts.places / experts.count) ** tokens)


def of_directory(directory: Path, name: str = "") -> Model:
    """A GGUF file or a checkpoint directory. Raises UserError when it is no checkpoint of a Llama shape."""
    try:
        if (gguf := gguf_file(directory)) is not None:
            return of_file(gguf)
    except ConfigError as error:
        raise UserError(str(error)) from None
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); --model-dir is a Hugging Face checkpoint directory"
        ) from None
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    if missing := [key for key in needed if key not in config]:
        raise UserError(f"{file} has no {missing[0]}; models of the Llama family can be compared")
    return Model(name or directory.resolve().name, directory.resolve(), config)


def of_shape(shape: str, progress: SteppedProgress) -> Model:
    """A model of random weights, made by seed if it is not there yet. Raises CommandFailed."""
    directory = BENCH / "models" / shape
    if not directory.exists():
        unfinished = _unfinished(directory)
        command = make_command(shape, unfinished, ROOT / "models" / "default")
        commands.run(command, progress, f"making the {shape} shape of random weights (once)")
        unfinished.rename(directory)
    return of_directory(directory)


def make_command(shape: str, directory: Path, tokenizer_from: Path) -> list[str]:
    command = [sys.executable, "-m", "tools.make_random_model", str(directory), "--shape", shape]
    return [*command, "--family", SHAPES[shape], "--tokenizer-from", str(tokenizer_from)]


def form_for(
    engine: EngineSpec, python: Path, model: Model, weights: str, setting: str, progress: SteppedProgress
) -> Path:
    """The model in the form that the engine reads in a setting, made with the converter's environment. Raises Skipped."""
    if setting == FILE:
        return model.directory
    if engine.name == "openvino":
        return _form(openvino_form(weights, setting), "openvino", python, model, progress)
    if "llamacpp" in engine.name:
        return _form(setting, "gguf", python, model, progress)
    return model.directory


def gguf_with_vocabulary(python: Path, model: Model, progress: SteppedProgress) -> Path:
    """The model in bfloat16 with its vocabulary, for llama.cpp's own server. `python` has gguf. Raises Skipped."""
    return _form("bf16-vocabulary", "gguf", python, model, progress)


def openvino_form(weights: str, setting: str) -> str:
    """What is exported for a setting: a key of OPENVINO_FORMS."""
    return f"{weights}-{setting.partition(':')[0]}" if ":" in setting else weights


def _form(kind: str, family: str, python: Path, model: Model, progress: SteppedProgress) -> Path:
    """`kind`: a key of OPENVINO_FORMS or a type of GGUF files. Raises Skipped."""
    form = BENCH / "forms" / f"{model.name}-{_key(model)}" / f"{family}-{kind}"
    if form.exists():
        return form
    unfinished = _unfinished(form)
    if family == "openvino":
        export = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(model.directory)]
        command = [*export, "--task", "text-generation-with-past", *OPENVINO_FORMS[kind], str(unfinished)]
    elif kind in GGUF_WRITTEN:
        command = to_gguf(model.directory, unfinished, *GGUF_WRITTEN[kind])
    else:
        source = _form("bf16", family, python, model, progress)
        command = [str(python), "-m", "benchmarks.peers.quantize_gguf", str(source), str(unfinished), kind]
    title = f"converting {model.name} to {family}, {kind} (once)"
    log = BENCH / f"convert-{family}.log"
    try:
        commands.run(command, progress, title, environment={"HF_HUB_OFFLINE": "1"}, log=log)
    except commands.CommandFailed as failure:
        raise Skipped(f"{model.name} cannot be converted to {family}, {kind}: {failure}") from None
    unfinished.rename(form)
    return form


def to_gguf(directory: Path, file: Path, *options: str) -> list[str]:
    """The command that writes a checkpoint as a GGUF file; it needs requirements/gguf.txt."""
    command = [sys.executable, "-m", "backend.convert", str(directory), "--output", str(file)]
    return [*command, "--to", "gguf", *options]


def _unfinished(path: Path) -> Path:
    """Where `path` is made before it gets its name."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    return unfinished


def _key(model: Model) -> str:
    """Changes with the checkpoint's place and files."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in model.files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:12]
