"""Tokenizers and chat templates that must be refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.model.hostile.base import TOKENIZER, Case, both, deep, instead, merged, remove, sparse, text

JSON, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def _case(name: str, spoil: Callable[[Path], object], *tells: str) -> Case:
    return Case(name, spoil, tells, "text")


def _model(**changes: object) -> Callable[[Path], None]:
    return merged(JSON, model=TOKENIZER["model"] | changes)


def _settings(key: str, value: object, *tells: str) -> Case:
    return _case(f"{key} is {str(value)[:40]}", merged(SETTINGS, **{key: value}), SETTINGS, key, *tells)


def _added(name: str, token: object, *tells: str) -> Case:
    spoil = merged(SETTINGS, added_tokens_decoder={"40": token})
    return _case(f"added token: {name}", spoil, SETTINGS, "added_tokens_decoder", *tells)


def _nested(levels: int) -> dict[str, object]:
    normalizer: dict[str, object] = {"type": "NFC"}
    for _ in range(levels):
        normalizer = {"type": "Sequence", "normalizers": [normalizer]}
    return normalizer


def _code(directory: Path) -> None:
    """A tokenizer that wants Python of its own to be run."""
    (directory / JSON).unlink()
    (directory / "vocab.txt").write_text("a\n")
    (directory / "evil.py").write_text("open('was-run', 'w')\nclass Evil: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (directory / SETTINGS).write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map}))


def _piped_vocabulary(directory: Path) -> None:
    (directory / JSON).unlink()
    os.mkfifo(directory / "vocab.json")
    (directory / "merges.txt").write_text("")
    (directory / SETTINGS).write_text('{"tokenizer_class": "GPT2Tokenizer"}')


_EXPRESSION = dict(type="Replace", pattern={"Regex": "(((("}, content="")
TOKENIZERS = [
    _case("tokenizer is missing", remove(JSON), JSON),
    _case("tokenizer is empty", text(JSON, ""), JSON, "empty"),
    _case("tokenizer is a directory", instead(JSON, os.mkdir), JSON, "directory"),
    _case("tokenizer is a pipe", instead(JSON, os.mkfifo), JSON, "pipe"),
    _case("tokenizer leads nowhere", instead(JSON, lambda path: path.symlink_to("gone")), JSON, "link"),
    _case("tokenizer leads out", instead(JSON, lambda path: path.symlink_to("/etc/hostname")), JSON, "link"),
    _case("tokenizer is not UTF-8", text(JSON, b'{"a": "\xff"}'), JSON, "UTF-8"),
    _case("tokenizer is deep", text(JSON, deep(100_000)), JSON),
    _case("tokenizer is a terabyte", sparse(JSON, 1 << 40), JSON, "1099511627776"),
    _case("tokenizer is a list", text(JSON, "[]"), JSON),
    _case("tokenizer without a model", merged(JSON, model="DELETE"), JSON),
    _case("tokenizer with a model of text", merged(JSON, model="BPE"), JSON),
    _case("tokenizer with a vocabulary of text", _model(vocab="abc"), JSON),
    _case("tokenizer with ids of text", _model(vocab={"a": "1"}), JSON),
    _case("tokenizer with negative ids", _model(vocab={"a": -1}), JSON),
    _case("tokenizer with ids of 10^400", _model(vocab={"a": 10**400}), JSON),
    _case("tokenizer of a kind that is none", _model(type="Evil"), JSON),
    _case(
        "tokenizer with merges of nothing", merged(JSON, model=dict(type="BPE", vocab={"a": 0}, merges=["b c"])), JSON
    ),
    _case("tokenizer with an expression that is none", merged(JSON, normalizer=_EXPRESSION), JSON),
    _case("tokenizer with 200 sequences", merged(JSON, normalizer=_nested(200)), JSON),
    _case("no tokenizer, but code", _code, JSON),
    _case("no tokenizer, but a pipe", _piped_vocabulary, "vocab.json", "pipe"),
    _case("no tokenizer, but a spoiled model", both(remove(JSON), text("tokenizer.model", b"\xff" * 99)), JSON),
    _case("eos ids of the generation config", merged("generation_config.json", eos_token_id={"a": 1}), "eos_token_id"),
    _case("an eos id below zero", merged("generation_config.json", eos_token_id=[-1]), "eos_token_id", "-1"),
]
SETTINGS_CASES = [
    _case("settings are a list", text(SETTINGS, "[]"), SETTINGS, "list"),
    _case("settings are deep", text(SETTINGS, deep(100_000)), SETTINGS, "nested", "32"),
    _case("settings are not UTF-8", text(SETTINGS, b'{"a": "\xff"}'), SETTINGS, "UTF-8"),
    _case("settings are a pipe", instead(SETTINGS, os.mkfifo), SETTINGS, "pipe"),
    _case("settings are a terabyte", sparse(SETTINGS, 1 << 40), SETTINGS, "1099511627776"),
    _case(
        "special tokens are deep", text("special_tokens_map.json", deep(100_000)), "special_tokens_map.json", "nested"
    ),
    _settings("eos_token", 1, "1"),
    _settings("eos_token", ["</s>"], "</s>"),
    _settings("eos_token", {"content": 3}, "content", "3"),
    _settings("eos_token", {"lstrip": True}, "content"),
    _settings("split_special_tokens", "no", "'no'", "bool"),
    _settings("clean_up_tokenization_spaces", [1], "[1]", "bool"),
    _settings("added_tokens_decoder", ["</s>"], "</s>"),
    _settings("added_tokens_decoder", {"one": {"content": "x"}}, "one"),
    _settings("added_tokens_decoder", {"9" * 5000: {"content": "x"}}),
    _settings("added_tokens_decoder", {"1": "x"}, "x"),
    _settings("added_tokens_decoder", {str(i): {"content": f"<{i}>"} for i in range(20_001)}, "20001", "20000"),
    _added("without content", {"special": True}, "content"),
    _added("content is a number", {"content": 7}, "content", "7"),
    _added("a flag is text", {"content": "x", "lstrip": "no"}, "lstrip", "'no'"),
    _settings("extra_special_tokens", 3, "3"),
    _settings("extra_special_tokens", [3], "3"),
    _settings("extra_special_tokens", {"a": {"b": "c"}}, "content"),
    _settings("additional_special_tokens", "abc", "abc"),
]
TEMPLATES = [
    _case("template is a directory", instead(TEMPLATE, os.mkdir), TEMPLATE, "directory"),
    _case("template is a pipe", instead(TEMPLATE, os.mkfifo), TEMPLATE, "pipe"),
    _case("template leads out", instead(TEMPLATE, lambda path: path.symlink_to("/etc/hostname")), TEMPLATE, "link"),
    _case("template leads nowhere", instead(TEMPLATE, lambda path: path.symlink_to("gone")), TEMPLATE, "link"),
    _case("template is not UTF-8", text(TEMPLATE, b"{{ '\xff' }}"), TEMPLATE, "UTF-8"),
    _case("template is a terabyte", sparse(TEMPLATE, 1 << 40), TEMPLATE, "1099511627776"),
    _case("template of a million expressions", text(TEMPLATE, "{{ a }}" * 1_000_000), TEMPLATE, "7000000"),
    _case("template of 5,000 tags", text(TEMPLATE, "{{ a }}" * 5000), TEMPLATE, "5000", "4096"),
    _case("template of wrong syntax", text(TEMPLATE, "{% for x %}"), "chat template", "line 1"),
    _case("template with a filter that is none", text(TEMPLATE, "{{ 1|evil }}"), "chat template", "line 1"),
    _case(
        "template 10,000 brackets deep", text(TEMPLATE, "{{ " + "(" * 10_000 + ")" * 10_000 + " }}"), "chat template"
    ),
    _case("template 10,000 lists deep", text(TEMPLATE, "{{ " + "[" * 10_000 + "]" * 10_000 + " }}"), "chat template"),
    _case("template 10,000 not deep", text(TEMPLATE, "{{ " + "not " * 10_000 + "1 }}"), "chat template"),
    _case(
        "template of 50 loops in one another",
        text(TEMPLATE, "{% for a in b %}" * 50 + "{% endfor %}" * 50),
        "chat template",
    ),
    _case("template with a number of 5,000 digits", text(TEMPLATE, "{{ " + "9" * 5000 + " }}"), "chat template"),
    _case(
        "template is a number",
        both(remove(TEMPLATE), merged(SETTINGS, chat_template=3)),
        SETTINGS,
        "chat_template",
        "3",
    ),
    _case(
        "templates without names",
        both(remove(TEMPLATE), merged(SETTINGS, chat_template=[{"template": "x"}])),
        SETTINGS,
        "chat_template",
        "name",
    ),
    _case(
        "templates of numbers",
        both(remove(TEMPLATE), merged(SETTINGS, chat_template=[{"name": "default", "template": 3}])),
        SETTINGS,
        "chat_template",
        "3",
    ),
    _case(
        "templates of text", both(remove(TEMPLATE), merged(SETTINGS, chat_template=["x"])), SETTINGS, "chat_template"
    ),
    _case(
        "a template of a megabyte in the settings",
        both(remove(TEMPLATE), merged(SETTINGS, chat_template="{{ a }}" * 150_000)),
        SETTINGS,
        "1050000",
    ),
]
CASES = [*TOKENIZERS, *SETTINGS_CASES, *TEMPLATES]
