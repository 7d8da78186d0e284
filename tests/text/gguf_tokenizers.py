"""GGUF files that hold a tokenizer and nothing else, written with llama.cpp's own package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType
from tokenizers import Tokenizer as Backend


def write_file(path: Path, backend: Backend, config: dict[str, Any], **settings: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, backend, config, **settings)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(
    writer: gguf.GGUFWriter,
    backend: Backend,
    config: dict[str, Any],
    pre: str | None = None,
    scores: list[float] | None = None,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    eot: str | None = None,
    eom: str | None = None,
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
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    for name, key in dict(bos="bos_token", eos="eos_token", unk="unk_token", pad="pad_token").items():
        if config.get(key):
            getattr(writer, f"add_{name}_token_id")(vocab[config[key]])
    if eot is not None:
        writer.add_eot_token_id(vocab[eot])
    if eom is not None:
        writer.add_eom_token_id(vocab[eom])
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if add_eos is not None:
        writer.add_add_eos_token(add_eos)
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def _type(token: str, added: dict[str, Any], config: dict[str, Any], is_byte_level: bool) -> TokenType:
    if token == config.get("unk_token") and not is_byte_level:
        return TokenType.UNKNOWN
    if token in added:
        return TokenType.CONTROL if added[token].special else TokenType.USER_DEFINED
    is_byte = not is_byte_level and re.fullmatch("<0x[0-9A-F]{2}>", token)
    return TokenType.BYTE if is_byte else TokenType.NORMAL
