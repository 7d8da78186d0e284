"""models.json, and several --model: what is read, and each error in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import UserError
from deploy.models_file import GIB, MAX_MODELS, Entry, named_on_the_command_line, read_models, told_bytes


def written(directory: Path, content: Any) -> Path:
    path = directory / "models.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_default_model_comes_first_and_everything_else_has_a_default(tmp_path: Path) -> None:
    path = written(tmp_path, {"default": "b", "models": {"a": {"path": "x"}, "b": {"path": "y", "memory": "30%"}}})
    models = read_models(path)
    assert list(models.entries) == ["b", "a"] and models.entries["a"] == Entry(path="x")
    assert models.file == path and models.again() == models


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "it is not JSON in UTF-8"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"models": {"a": {"path": "x", "threads": "\\ud800"}}}', "it is not JSON in UTF-8"),
        ({"models": {"a": {"path": "x\0"}}}, "model a: a text has the character \\u0000; leave it out"),
        ({"models": {"a": {"path": "x", "names": ["\0"]}}}, "model a: a text has the character \\u0000"),
        ('{"models": {"a": {"path": "x"}, "a": {"path": "y"}}}', "'a' is there twice"),
        ([], "a JSON object is expected"),
        ({}, "missing required field"),
        ({"models": {}}, "0 models, allowed are 1 to 32"),
        ({"models": {f"m{n}": {"path": "x"} for n in range(MAX_MODELS + 1)}}, "33 models, allowed are 1 to 32"),
        ({"models": {"a": {"path": "x"}}, "defualt": "a"}, "'defualt' is no known key; did you mean default?"),
        ({"models": {"a": {"path": "x"}}, "default": "b"}, "default is 'b', there are a"),
        ({"models": {"a": {"path": "x", "memroy": 1}}}, "model a: 'memroy' is no known key; did you mean memory?"),
        ({"models": {"a": {}}}, "missing required field path"),
        ({"models": {"a": {"path": ""}}}, "model a: path is empty"),
        ({"models": {"a": {"path": 7}}}, "Expected str, got int"),
        ({"models": {"a": 7}}, "model a: Expected object, got int"),
        ({"models": {"../a": {"path": "x"}}}, "the name is '../a'"),
        ({"models": {"a" * 65: {"path": "x"}}}, "it has 1 to 64 letters"),
        ({"models": {"everbatch": {"path": "x"}}}, "everbatch is the name of the default model"),
        ({"models": {"a": {"path": "x", "memory": 0}}}, "memory is 0, allowed are more than 0"),
        ({"models": {"a": {"path": "x", "memory": -1}}}, "memory is -1, allowed are more than 0"),
        ('{"models": {"a": {"path": "x", "memory": 1e999}}}', "memory is inf, allowed are more than 0"),
        ('{"models": {"a": {"path": "x", "memory": 1e308}}}', "memory is 1e+308, allowed are more than 0"),
        ({"models": {"a": {"path": "x", "memory": "101%"}}}, "memory is '101%'; it is a number of GiB, or a share"),
        ({"models": {"a": {"path": "x", "memory": "4 GB"}}}, "memory is '4 GB'; it is a number of GiB, or a share"),
        ({"models": {"a": {"path": "x", "threads": 0}}}, "threads is 0, allowed is 1 to 1024"),
        ({"models": {"a": {"path": "x", "idle_unload_s": 0}}}, "idle_unload_s is 0, allowed are 1 to 1e+07 seconds"),
        ('{"models": {"a": {"path": "x", "load_timeout_s": NaN}}}', "load_timeout_s is nan, allowed are 1 to"),
        ({"models": {"a": {"path": "x", "drain_timeout_s": 1e308}}}, "drain_timeout_s is 1e+308, allowed are 1 to"),
        (
            {"models": {"a": {"path": "x"}, "b": {"path": "y", "names": ["a"]}}},
            "'a' is a name of models a and b; choose another one",
        ),
        (
            {"models": {"a": {"path": "x", "lora": ["doll=d"]}, "b": {"path": "y", "names": ["doll"]}}},
            "'doll' is a name of models a and b",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_sentence(content: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_models(written(tmp_path, content))
    text = str(caught.value)
    assert text.startswith("--models models.json: ") and sentence in text and "\n" not in text and len(text) < 400


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--models none.json: it cannot be read \(No such file or directory\)"):
        read_models(tmp_path / "none.json")


def test_several_models_of_the_command_line(tmp_path: Path) -> None:
    models = named_on_the_command_line(["a=x", "b=y"])
    assert models is not None and models.entries == {"a": Entry(path="x"), "b": Entry(path="y")}
    assert models.again() == models, "there is no file that could have changed"
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert named_on_the_command_line([str(odd)]) is None, "a path that exists is a path"
    assert named_on_the_command_line(["x"]) is None and named_on_the_command_line([]) is None
    assert named_on_the_command_line(["a=x"]) is not None, "one model with a name can be replaced"
    with pytest.raises(UserError, match="several models need names"):
        named_on_the_command_line(["a=x", "y"])
    with pytest.raises(UserError, match="given twice"):
        named_on_the_command_line(["a=x", "a=y"])


def test_memory_is_in_gib_or_a_share_of_what_is_free() -> None:
    assert told_bytes(Entry(path="x", memory=1.5), 0) == int(1.5 * GIB)
    assert told_bytes(Entry(path="x", memory="25%"), 1000) == 250
    assert told_bytes(Entry(path="x"), 1000) is None
