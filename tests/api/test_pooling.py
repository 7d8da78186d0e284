"""What the files of sentence-transformers say about pooling, in its older form and its newer one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.api import ConfigError
from backend.api.checkpoint.pooling import Pooling, read_pooling

STEPS = ["Transformer", "Pooling", "Normalize"]


def write(directory: Path, steps: list[str] | str = STEPS, pooling: Any = None, **files: Any) -> Path:
    (directory / "1_Pooling").mkdir()
    modules = (
        steps
        if isinstance(steps, str)
        else json.dumps(
            [
                {"idx": n, "path": ["", "1_Pooling", ""][n % 3], "type": f"sentence_transformers.models.{step}"}
                for n, step in enumerate(steps)
            ]
        )
    )
    (directory / "modules.json").write_text(modules)
    if pooling is not None:
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_without_the_files_it_is_the_last_token_normalised(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == read_pooling(tmp_path / "model.gguf") == Pooling("last", True)


@pytest.mark.parametrize(
    ("steps", "pooling", "expected"),
    [
        (STEPS, {"pooling_mode_lasttoken": True}, Pooling("last", True, is_declared=True)),
        (STEPS, {"pooling_mode": "lasttoken"}, Pooling("last", True, is_declared=True)),
        (STEPS[:2], {"pooling_mode": ["mean"], "include_prompt": False}, Pooling("mean", False, is_declared=True)),
        (
            STEPS,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            Pooling("mean", True, is_declared=True),
        ),
        (STEPS, {"pooling_mode_cls_token": True}, Pooling("first", True, is_declared=True)),
        (STEPS, {"word_embedding_dimension": 8}, Pooling("mean", True, is_declared=True)),  # its default
    ],
)
def test_the_files_say_what_is_pooled_and_whether_it_is_normalised(
    steps: list[str], pooling: dict[str, Any], expected: Pooling, tmp_path: Path
) -> None:
    assert read_pooling(write(tmp_path, steps, pooling)) == expected


def test_a_decoder_and_an_encoder_pool_in_their_own_ways() -> None:
    first = Pooling("first", is_declared=True)
    assert first.of_model(reads_whole_texts=True) == first
    assert "pooling by the first token is not served" in first.of_model(reads_whole_texts=False).refusal
    assert Pooling().of_model(reads_whole_texts=True).kind == "mean"
    for kind in ("last", "mean"):
        declared = Pooling(kind, is_declared=True)
        assert declared.of_model(reads_whole_texts=True) == declared == declared.of_model(reads_whole_texts=False)


def test_a_default_prompt_stands_before_each_text(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    directory = write(tmp_path, STEPS, {"pooling_mode": "lasttoken"}, config_sentence_transformers=settings)
    assert read_pooling(directory).prompt == "Q: "


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"is_matryoshka": True}, None),
        ({"is_matryoshka": False}, ()),
        ({"matryoshka_dimensions": [64, 32]}, (32, 64)),
    ],
)
def test_config_json_says_to_which_lengths_vectors_may_be_cut(
    config: dict[str, Any], expected: tuple[int, ...] | None, tmp_path: Path
) -> None:
    assert read_pooling(write(tmp_path, STEPS, {"pooling_mode": "mean"}, config=config)).dimensions == expected


MODE = {"pooling_mode": "lasttoken"}
PROMPT = {"prompts": {"a": "A"}, "default_prompt_name": "b"}


@pytest.mark.parametrize(
    ("steps", "pooling", "settings", "sentence"),
    [
        (
            [*STEPS, "Dense"],
            MODE,
            {},
            "modules.json: Dense is not served; served are Transformer, Pooling and Normalize",
        ),
        (
            ["Pooling", "Transformer"],
            MODE,
            {},
            "modules.json: Pooling, Transformer; served is Transformer, Pooling, then",
        ),
        ([], MODE, {}, "modules.json: ; served is Transformer"),
        (STEPS, None, {}, "modules.json: there is no file 1_Pooling/config.json; fetch it too"),
        (
            STEPS,
            {"pooling_mode": "max"},
            {},
            "1_Pooling/config.json: pooling by max is not served; served are cls, lasttoken, mean",
        ),
        (
            STEPS,
            {"pooling_mode": ["mean", "max"]},
            {},
            "1_Pooling/config.json: pooling by mean, max at once is not served",
        ),
        (STEPS, {"pooling_mode": 5}, {}, "1_Pooling/config.json: "),
        (STEPS, MODE, PROMPT, "config_sentence_transformers.json: default_prompt_name b is none of its prompts"),
        (
            STEPS,
            {**MODE, "include_prompt": False},
            {**PROMPT, "default_prompt_name": "a"},
            "1_Pooling/config.json: include_prompt",
        ),
    ],
)
def test_what_is_not_computed_here_refuses_embeddings_and_nothing_else(
    steps: list[str], pooling: Any, settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    found = read_pooling(write(tmp_path, steps, pooling, config_sentence_transformers=settings))
    assert found.is_declared and found.refusal.startswith(sentence), found.refusal


@pytest.mark.parametrize("text", ["[", '{"a": 1}', "[5]", "[" * 100_000])
def test_modules_that_cannot_be_read_are_an_error_of_the_checkpoint(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^modules\.json"):
        read_pooling(write(tmp_path, text))


def test_a_path_out_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text(json.dumps(MODE))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "1_Pooling").symlink_to(outside)
    modules = [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}]
    (inside / "modules.json").write_text(json.dumps(modules))
    assert "link" in read_pooling(inside).refusal
    modules[1]["path"] = "../outside"
    (inside / "modules.json").write_text(json.dumps(modules))
    assert read_pooling(inside).refusal
