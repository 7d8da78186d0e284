"""Tiny Qwen3 checkpoints that make embeddings, with the files that sentence-transformers writes beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tools.make_random_model import make_random_model

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "default"
# The parts of the prompt of Qwen3-Reranker's model card, each of which is tokenised by itself.
QWEN_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n"
    "<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


def embedding_model(
    directory: Path, pooling: str | None = "lasttoken", normalize: bool = True, is_bare: bool = False
) -> Path:
    """The same random weights each time. `pooling` None: without the files. `is_bare`: without the head and the names' prefix."""
    vocab_size = json.loads((TOKENIZER / "config.json").read_text())["vocab_size"]
    make_random_model(directory, "qwen3", seed=3, vocab_size=vocab_size, max_position_embeddings=512)
    shutil.copy(TOKENIZER / "tokenizer_config.json", directory)
    _write(directory / "tokenizer.json", _with_words(json.loads((TOKENIZER / "tokenizer.json").read_text())))
    if is_bare:
        tensors = load_file(directory / "model.safetensors")
        bare = {name.removeprefix("model."): each for name, each in tensors.items() if not name.startswith("lm_head")}
        save_file(bare, directory / "model.safetensors", {"format": "pt"})
    if pooling is not None:
        write_modules(directory, pooling, normalize, dimensions=48)
    return directory


def _with_words(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer, in which the last two entries of the vocabulary are `yes` and `no`, where it has no such tokens."""
    vocab = tokenizer["model"]["vocab"]
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    free = [token for token in sorted(vocab, key=lambda token: -vocab[token]) if token not in added]
    for word in ("yes", "no"):
        if word not in vocab:
            vocab[word] = vocab.pop(free.pop(0))
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if _joined(pair) in vocab]
    return tokenizer


def _joined(pair: Any) -> str:
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)


def write_modules(directory: Path, pooling: str, normalize: bool, dimensions: int) -> None:
    """The files of sentence-transformers before 6. `pooling`: lasttoken, mean or cls; `dimensions`: of the hidden states."""
    kinds = ["Transformer", "Pooling", "Normalize"][: 3 if normalize else 2]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths))
    ]
    for path in paths[1 : len(kinds)]:
        (directory / path).mkdir()
    _write(directory / "modules.json", modules)
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    chosen = {"lasttoken": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[pooling]
    config = {f"pooling_mode_{flag}": flag == chosen for flag in flags}
    _write(
        directory / "1_Pooling" / "config.json",
        {"word_embedding_dimension": dimensions, **config, "include_prompt": True},
    )
    _write(directory / "config_sentence_transformers.json", {"prompts": {"query": "q: "}, "default_prompt_name": None})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
