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
from msgspec import Struct
from tokenizers import AddedToken

from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.api.model_files import REMEDY, convert, find_file, read_object, read_text, shown, token_ids
from backend.text.decoding import CLEANUP, DecodePipeline, build_pipeline

TOKEN_LISTS = (
    "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
)  # fmt: skip
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILE, CONFIG, OLDER_CONFIG = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
MAX_TOKENIZER_BYTES = 64 << 20
MAX_ADDED_TOKENS = 20_000
OLDER_SUFFIXES = (".json", ".txt", ".model", ".tiktoken")
NO_TOKENIZER = ("config.json", "generation_config.json", "model.safetensors.index.json", "README.txt", "LICENSE.txt")


class _Token(Struct):
    """A token in tokenizer_config.json, if it is no plain string."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None


TOKEN_FIELDS = _Token.__struct_fields__


class _Config(Struct):
    """What is used of tokenizer_config.json."""

    added_tokens_decoder: dict[str, Any] | None = None  # of _Token
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    additional_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    model_specific_special_tokens: dict[str, str | _Token] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    split_special_tokens: bool | None = None
    clean_up_tokenization_spaces: bool | None = None


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
        config, eos_ids = _read_config(path), _eos_ids(path)
        backend = _convert(path) if find_file(path, FILE) is None else _read_backend(path)
        return cls(backend, config, eos_ids)

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


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, or {}; what is used of it has the types that it should have. Raises ConfigError."""
    config = read_object(path, CONFIG) or {}
    name = CONFIG
    if "added_tokens_decoder" not in config:  # transformers reads the older file only then
        older = read_object(path, OLDER_CONFIG)
        _check_config(config, CONFIG)
        config, name = {**config, **(older or {})}, CONFIG if older is None else OLDER_CONFIG
    _check_config(config, name)
    return config


def _check_config(config: dict[str, Any], name: str) -> None:
    convert(config, _Config, name)
    for key in TOKEN_LISTS:
        count = len(config.get(key) or ())
        if count > MAX_ADDED_TOKENS:
            raise ConfigError(
                f"{name}: {key} has {count} tokens, at most {MAX_ADDED_TOKENS} can be added; put them into {FILE}"
            )
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ConfigError(
                f"{name}: added_tokens_decoder has the key {shown(key)}, an id of a token is needed; {REMEDY}"
            )
        convert(token, _Token, name, f"added_tokens_decoder.{key}")
    further = _further_tokens(config)
    if len(further) > MAX_ADDED_TOKENS:
        raise ConfigError(
            f"{name} names {len(further)} tokens, at most {MAX_ADDED_TOKENS} can be added; put them into {FILE}"
        )
    for key, token in further.items():
        if isinstance(token, dict):
            convert(token, _Token, name, key)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path, FILE, MAX_TOKENIZER_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ConfigError(f"{FILE} of the model cannot be read as a tokenizer; fetch it again") from error
    except BaseException as error:  # a panic of the library, which is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{FILE} of the model cannot be read as a tokenizer; fetch it again") from error


def _convert(path: Path) -> tokenizers.Tokenizer:
    """Let transformers build a fast tokenizer from older files (vocab.txt, merges.txt, tokenizer.model)."""
    names = [each.name for each in path.glob("*") if each.suffix in OLDER_SUFFIXES]
    for name in names:  # transformers opens them without a look
        find_file(path, name, MAX_TOKENIZER_BYTES)
    if not set(names) - {*NO_TOKENIZER, CONFIG}:
        raise ConfigError(f"the model directory has no {FILE}, and none of the older files; add a {FILE}")
    import transformers  # slow to import, and needed by few models

    try:
        converted = transformers.AutoTokenizer.from_pretrained(
            str(path), use_fast=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers and the libraries below it make of the files
        raise ConfigError(
            f"the model directory has no {FILE}, and transformers cannot convert its other files "
            f"({type(error).__name__}); add a {FILE}"
        ) from error
    if not getattr(converted, "is_fast", False):
        raise Unsupported(f"{type(converted).__name__} has no fast version; add a {FILE} to the model")
    return converted.backend_tokenizer


def _eos_ids(path: Path) -> list[int]:
    """eos_token_id of generation_config.json, or of config.json without that file (as transformers derives it)."""
    for name in ("generation_config.json", "config.json"):
        content = read_object(path, name)
        if content is not None:
            return list(token_ids(content, "eos_token_id", name))
    return []


def _text_of(token: Any) -> str | None:
    """A token in tokenizer_config.json is a string, or an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, ... and further ones -> their texts."""
    tokens = {**_further_tokens(config), **{name: config.get(name) for name in NAMED_TOKENS}}
    named = {name: _text_of(token) for name, token in tokens.items()}
    return {name: text for name, text in named.items() if text}


def _further_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Tokens that the model names beside NAMED_TOKENS: keys such as image_token, and what is listed as an object."""
    own = {key: config[key] for key in config if key.endswith("_token") and key not in NAMED_TOKENS}
    tokens = {key: token for key, token in own.items() if isinstance(token, str) or _is_token(token)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    listed = extra if isinstance(extra, dict) else {}
    return {**tokens, **(config.get("model_specific_special_tokens") or {}), **listed}


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _as_added(token: str | dict[str, Any], special: bool) -> AddedToken:
    """`special` marks the token whatever its object says; an object that does not say is no special token."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    fields = {key: token[key] for key in TOKEN_FIELDS if token.get(key) is not None}
    return AddedToken(**{**fields, "special": special or fields.get("special", False)})


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add what tokenizer_config.json names and tokenizer.json lacks, in transformers' order: listed, named, extra."""
    known = backend.get_added_tokens_decoder().values()
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    added = [_as_added(token, special=False) for _, token in listed]
    old = {repr(token) for token in known}
    missing = [token for token in added if repr(token) not in old]
    texts = {token.content for token in (*known, *missing)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [*_further_tokens(config).values(), *([] if isinstance(extra, dict) else extra)]
    named = [config[name] for name in NAMED_TOKENS if config.get(name)]
    for token, special in [*((token, True) for token in named), *((token, False) for token in extra)]:
        if _text_of(token) not in texts:
            texts.add(_text_of(token))
            missing.append(_as_added(token, special))
    if missing:
        backend.add_tokens(missing)
