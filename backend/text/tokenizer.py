"""Tokenizer: text to token ids and back, from a model directory, without torch.

tokenizer.json is the truth, as it is for transformers (5.x): its post-processor decides which special tokens `encode`
adds; `add_bos_token` and `add_eos_token` of tokenizer_config.json are ignored beside it, and truncation and padding
written in it are switched off. tokenizer_config.json only adds tokens that tokenizer.json lacks, marks named tokens
as special, and names bos and eos. What transformers' model-specific classes do beyond that (LlamaTokenizer rebuilds
its normalizer) is not repeated: a checkpoint whose tokenizer.json disagrees with its class is read as its
tokenizer.json says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.text.decoding import CLEANUP, DecodePipeline, build_pipeline

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Immutable after construction; safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None, eos_ids: Sequence[int] = ()
    ):
        """`backend` is taken over. `config`: tokenizer_config.json; `eos_ids`: those of generation_config.json."""
        config = config or {}
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        _add_tokens(backend, config)
        self.special_tokens: dict[str, str] = _named_tokens(config)  # bos_token, eos_token, ... -> text
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if self.eos_id is None else [self.eos_id])]))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        state = json.loads(backend.to_str())
        # transformers leaves BPE alone: the clean-up would eat real spaces
        self._cleanup = bool(config.get("clean_up_tokenization_spaces", False)) and state["model"].get("type") != "BPE"
        self._decoder = state.get("decoder")
        self._pipeline: DecodePipeline | None = None
        self._tokens: dict[int, str | None] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and its neighbours. Without it, ask transformers to convert what is there.

        Raises ConfigError when the directory has no tokenizer that can be read.
        """
        path = Path(path)
        config = read_json(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # transformers reads the older file only then
            config = {**config, **read_json(path / "special_tokens_map.json")}
        eos_ids = _eos_ids(path)
        if (path / "tokenizer.json").is_file():
            return cls(_read_backend(path / "tokenizer.json"), config, eos_ids)
        return cls(_convert(path), config, eos_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest when it is not Unicode text (a lone surrogate).

        Other threads run meanwhile: the library lets go of the interpreter's lock for a batch, never for a single text.
        Without offsets (`fast`) it is besides four times as quick; the ids are the same.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has a lone surrogate at character {error.start}, only Unicode can be tokenised; remove it"
            ) from None
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; an id beyond the vocabulary has none. Raises InvalidRequest for an id that is no uint32."""
        try:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise InvalidRequest("a token id is negative or above 4294967295; send ids of the vocabulary") from None
        if self._cleanup:
            for pattern, content in CLEANUP:
                text = text.replace(pattern, content)
        return text

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def visible_token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The vocabulary entry that the decoder is given for `token_id`; None when it decodes to nothing."""
        if skip_special_tokens and token_id in self.special_ids:
            return None
        if token_id not in self._tokens:
            self._tokens[token_id] = self._backend.id_to_token(token_id)
        return self._tokens[token_id]

    def new_pipeline(self) -> DecodePipeline:
        """A decoder for one stream of tokens. Raises Unsupported when this tokenizer's decoder cannot be streamed."""
        if self._pipeline is None:
            self._pipeline = build_pipeline(self._decoder, self._cleanup)
        return self._pipeline.copy()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} of the model cannot be read ({error}); replace the file") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"{path.name} of the model holds a {kind}, an object is needed; replace the file")
    return content


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ConfigError(f"{path.name} of the model cannot be read ({error}); replace the file") from error


def _convert(path: Path) -> tokenizers.Tokenizer:
    """Let transformers build a fast tokenizer from older files (vocab.txt, merges.txt, tokenizer.model)."""
    import transformers  # slow to import, and needed by few models

    try:
        converted = transformers.AutoTokenizer.from_pretrained(str(path), use_fast=True, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            "the model directory has no tokenizer.json, and transformers cannot convert its other files "
            f"({type(error).__name__}); add a tokenizer.json"
        ) from error
    if not getattr(converted, "is_fast", False):
        raise Unsupported(f"{type(converted).__name__} has no fast version; add a tokenizer.json to the model")
    return converted.backend_tokenizer


def _eos_ids(path: Path) -> list[int]:
    """eos_token_id of generation_config.json, or of config.json without that file (as transformers derives it)."""
    generation = path / "generation_config.json"
    eos = read_json(generation if generation.is_file() else path / "config.json").get("eos_token_id")
    return [] if eos is None else list(eos) if isinstance(eos, list) else [eos]


def _text_of(token: Any) -> str | None:
    """A token in tokenizer_config.json is a string, or an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: _text_of(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in named.items() if text}


def _as_added(token: str | dict[str, Any], special: bool) -> AddedToken:
    """`special` marks the token whatever its object says; an object that does not say is no special token."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    fields = {key: value for key, value in token.items() if key != "__type"}
    return AddedToken(**{**fields, "special": special or fields.get("special", False)})


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add what tokenizer_config.json names and tokenizer.json lacks, in transformers' order: listed, named, extra."""
    known = backend.get_added_tokens_decoder().values()
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    added = [_as_added(token, special=False) for _, token in listed]
    missing = [token for token in added if repr(token) not in {repr(old) for old in known}]
    texts = {token.content for token in (*known, *missing)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    named = [config[name] for name in NAMED_TOKENS if config.get(name)]
    for token, special in [*((token, True) for token in named), *((token, False) for token in extra)]:
        if _text_of(token) not in texts:
            texts.add(_text_of(token))
            missing.append(_as_added(token, special))
    if missing:
        backend.add_tokens(missing)
