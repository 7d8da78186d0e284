"""Tokenizer: turns text into token ids and back, as a model's directory or GGUF file says, without torch.

tokenizer.json decides, as it does for transformers (5.x). Its post-processor says which special tokens `encode` adds, so
`add_bos_token` and `add_eos_token` of tokenizer_config.json are ignored. Truncation and padding that it asks for are switched
off. tokenizer_config.json only adds tokens that tokenizer.json lacks, marks named tokens as special, and names bos and eos.
Some classes of transformers do more for their models (LlamaTokenizer rebuilds its normalizer). That is not repeated here: a
checkpoint whose tokenizer.json disagrees with such a class is read as its tokenizer.json says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from msgspec import Struct
from tokenizers import AddedToken

from backend.api.checkpoint.gguf import eos_ids, gguf_file, read_header
from backend.api.checkpoint.model_files import REMEDY, convert, find_file, read_object, read_text, shown, token_ids
from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.text.decoding import CLEANUP, DecodePipeline, build_pipeline
from backend.text.gguf_tokenizer import MAX_ADDED_TOKENS, build_tokenizer
from backend.text.gguf_vocabulary import library_errors
from backend.text.least_tokens import LeastTokens

TOKEN_LISTS = (
    "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
)  # fmt: skip
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILE, CONFIG, OLDER_CONFIG = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
MAX_TOKENIZER_BYTES = 64 << 20
OLDER_SUFFIXES = (".json", ".txt", ".model", ".tiktoken")
NO_TOKENIZER = ("config.json", "generation_config.json", "model.safetensors.index.json", "README.txt", "LICENSE.txt")


class _Token(Struct):
    """A token in tokenizer_config.json that is no plain string."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None


TOKEN_FIELDS = _Token.__struct_fields__


class _Config(Struct):
    """The part of tokenizer_config.json that is used."""

    added_tokens_decoder: dict[str, Any] | None = None  # The values are checked as _Token.
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
    """Does not change after its construction, and may be used by several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None, eos_ids: Sequence[int] = ()
    ) -> None:
        """Take over and change `backend`. `config` is tokenizer_config.json; `eos_ids` are those of generation_config.json."""
        config = config or {}
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        _add_tokens(backend, config)
        self.special_tokens: dict[str, str] = _named_tokens(config)  # the text of bos_token, eos_token, ...
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if self.eos_id is None else [self.eos_id])]))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        # As in transformers, the text of a BPE tokenizer is not cleaned up, because that would remove real spaces.
        is_bpe = isinstance(backend.model, tokenizers.models.BPE)
        self._cleanup = bool(config.get("clean_up_tokenization_spaces", False)) and not is_bpe
        self._decoder = _state(backend.decoder)
        self.is_byte_level = '"ByteLevel"' in json.dumps(self._decoder)  # entries stand for bytes, not for characters
        self._pipeline: DecodePipeline | None = None
        self._least: LeastTokens | None = None
        self._tokens: dict[int, str | None] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Read tokenizer.json and the files that belong to it. Without it, transformers converts older files.

        `path` may also be a GGUF file, or a directory that holds one. Raises ConfigError when there is no tokenizer that can
        be read.
        """
        path = Path(path)
        if (file := gguf_file(path)) is not None:
            header = read_header(file)
            return cls(*build_tokenizer(header), eos_ids(header))
        config, own_eos_ids = _read_config(path), _eos_ids(path)
        text = read_text(path, FILE, MAX_TOKENIZER_BYTES)
        return cls(_convert(path) if text is None else _parse(text), config, own_eos_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest when it is not Unicode text (a lone surrogate).

        Other threads can run meanwhile, because the library releases the interpreter's lock for a batch, though not for a single
        text. The fast form makes no offsets and takes a quarter of the time. It gives the same ids.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has a lone surrogate at character {error.start}, only Unicode can be tokenised; remove it"
            ) from None
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least: quickly found, seldom near the true one, 0 where nothing is known."""
        if self._least is None:  # Several threads may make it at once; they make the same.
            vocab = self._backend.get_vocab(with_added_tokens=True)
            self._least = LeastTokens(json.loads(self._backend.to_str()), vocab)
        return self._least.of(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. An id beyond the vocabulary has no text. Raises InvalidRequest for an id that is no uint32."""
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

    @property
    def num_ids(self) -> int:
        """One more than the highest id; ids in between may be unused."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def to_json(self) -> str:
        """The content of a tokenizer.json for this tokenizer."""
        text: str = self._backend.to_str()
        return text

    def visible_token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The vocabulary's entry for `token_id`, which the decoder is given; None if the token has no text."""
        if skip_special_tokens and token_id in self.special_ids:
            return None
        if token_id not in self._tokens:
            self._tokens[token_id] = self._backend.id_to_token(token_id)
        return self._tokens[token_id]

    def new_pipeline(self) -> DecodePipeline:
        """A new decoder for one stream of tokens. Raises Unsupported when this tokenizer's decoder cannot be streamed."""
        if self._pipeline is None:
            self._pipeline = build_pipeline(self._decoder, self._cleanup)
        return self._pipeline.copy()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _read_config(path: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, or {}. Raises ConfigError when a part that is used has the wrong type."""
    config = read_object(path, CONFIG) or {}
    name = CONFIG
    if "added_tokens_decoder" not in config:  # Only then transformers reads the older file.
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


def _parse(text: str) -> tokenizers.Tokenizer:
    """The tokenizer in the text of tokenizer.json. Raises ConfigError."""
    with library_errors(f"{FILE} of the model cannot be read as a tokenizer; fetch it again"):
        return tokenizers.Tokenizer.from_str(text)


def _convert(path: Path) -> tokenizers.Tokenizer:
    """Let transformers build a fast tokenizer of older files (vocab.txt, merges.txt, tokenizer.model). Raises ConfigError."""
    names = [each.name for each in path.glob("*") if each.suffix in OLDER_SUFFIXES]
    for name in names:  # Checked here, because transformers opens any kind of file.
        find_file(path, name, MAX_TOKENIZER_BYTES)
    if not set(names) - {*NO_TOKENIZER, CONFIG}:
        raise ConfigError(f"the model directory has no {FILE}, and none of the older files; add a {FILE}")
    import transformers  # Imported here, because that is slow and few models need it.

    try:
        converted = transformers.AutoTokenizer.from_pretrained(
            str(path), use_fast=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # Neither transformers nor the libraries below it say what they raise for bad files.
        raise ConfigError(
            f"the model directory has no {FILE}, and transformers cannot convert its other files "
            f"({type(error).__name__}); add a {FILE}"
        ) from error
    if not getattr(converted, "is_fast", False):
        raise Unsupported(f"{type(converted).__name__} has no fast version; add a {FILE} to the model")
    backend: tokenizers.Tokenizer = converted.backend_tokenizer
    return backend


def _eos_ids(path: Path) -> list[int]:
    """The eos_token_id of generation_config.json, or of config.json if that file is not there, as in transformers."""
    for name in ("generation_config.json", "config.json"):
        content = read_object(path, name)
        if content is not None:
            return list(token_ids(content, "eos_token_id", name))
    return []


def _text_of(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is a string or an object with a `content`."""
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


def _state(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as tokenizer.json has it. The whole file would take a second for 260,000 tokens."""
    state: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return state


def _as_added(token: str | dict[str, Any], special: bool) -> AddedToken:
    """Make a token that can be added. It is special if it is a plain string, if `special` is set or if its object says so."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    fields = {key: token[key] for key in TOKEN_FIELDS if token.get(key) is not None}
    return AddedToken(**{**fields, "special": special or fields.get("special", False)})


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that tokenizer.json lacks and tokenizer_config.json has. As in transformers, listed ones come first, then
    named ones, then extra ones.
    """
    known = backend.get_added_tokens_decoder().values()
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    added = [_as_added(token, special=False) for _, token in listed]
    old = {repr(token) for token in known}
    missing = [token for token in added if repr(token) not in old]
    texts: set[str | None] = {token.content for token in (*known, *missing)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [*_further_tokens(config).values(), *([] if isinstance(extra, dict) else extra)]
    named = [config[name] for name in NAMED_TOKENS if config.get(name)]
    for token, special in [*((token, True) for token in named), *((token, False) for token in extra)]:
        if _text_of(token) not in texts:
            texts.add(_text_of(token))
            missing.append(_as_added(token, special))
    if missing:
        backend.add_tokens(missing)
