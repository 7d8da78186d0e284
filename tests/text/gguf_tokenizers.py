"""GGUF files that hold a tokenizer and nothing else, written with llama.cpp's own package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType
from tokenizers import Tokenizer as Backend

# What of a tokenizer is written by which method of the package.
SETTINGS = dict(
    pre="add_tokenizer_pre",
    add_bos="add_add_bos_token",
    add_eos="add_add_eos_token",
    add_space_prefix="add_add_space_prefix",
    remove_extra_whitespaces="add_remove_extra_whitespaces",
    charsmap="add_precompiled_charsmap",
    chat_template="add_chat_template",
)


def write_file(path: Path, backend: Backend, config: dict[str, Any], family: str = "llama", **settings: Any) -> Path:
    writer = gguf.GGUFWriter(path, family)
    add_tokenizer(writer, backend, config, **settings)
    return _written(writer, path)


def write_tokens(path: Path, model: str, tokens: dict[str, TokenType], family: str = "llama", **settings: Any) -> Path:
    """A file with these tokens. `settings`: those of SETTINGS, scores, merges, ids such as bos_token_id, and other flags."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    for key, value in settings.items():
        if key in SETTINGS:
            getattr(writer, SETTINGS[key])(value)
        elif key in ("scores", "merges"):
            getattr(writer, f"add_token_{key}")(value)
        else:
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
            add(f"tokenizer.ggml.{key}", value)
    return _written(writer, path)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(
    writer: gguf.GGUFWriter,
    backend: Backend,
    config: dict[str, Any],
    scores: list[float] | None = None,
    eot: str | None = None,
    eom: str | None = None,
    **settings: Any,
) -> None:
    """As convert_hf_to_gguf.py does. `config` is tokenizer_config.json; with `scores` the file is one of SentencePiece's."""
    writer.add_tokenizer_model("gpt2" if scores is None else "llama")
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    writer.add_token_list(tokens)
    writer.add_token_types([_type(token, added, config, is_byte_level=scores is None) for token in tokens])
    if scores is None:
        merges = json.loads(backend.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        writer.add_token_scores(scores)
    for name, key in dict(bos="bos_token", eos="eos_token", unk="unk_token", pad="pad_token").items():
        if config.get(key):
            getattr(writer, f"add_{name}_token_id")(vocab[config[key]])
    if eot is not None:
        writer.add_eot_token_id(vocab[eot])
    if eom is not None:
        writer.add_eom_token_id(vocab[eom])
    for key, value in settings.items():
        if value is not None:
            getattr(writer, SETTINGS[key])(value)
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def _type(token: str, added: dict[str, Any], config: dict[str, Any], is_byte_level: bool) -> TokenType:
    if token == config.get("unk_token") and not is_byte_level:
        return TokenType.UNKNOWN
    if token in added:
        return TokenType.CONTROL if added[token].special else TokenType.USER_DEFINED
    is_byte = not is_byte_level and re.fullmatch("<0x[0-9A-F]{2}>", token)
    return TokenType.BYTE if is_byte else TokenType.NORMAL
