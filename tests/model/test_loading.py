"""Checkpoints: what is loaded, from where, and what is refused with which words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api import ConfigError
from backend.api.config.schema import ModelConfigSection, SchedulerConfig
from backend.core.step import ModelInfo
from backend.models.config import parse_model_config
from backend.models.convert import hf_to_meta, meta_to_hf
from backend.models.loader import read_eos_ids
from backend.worker.group import InProcessWorkerGroup
from tests.model.driver import Driver, GroupDriver
from tests.model.tiers import NATIVE, TORCH, TierCase
from tools.make_random_model import make_random_model

SCHEDULER = SchedulerConfig(max_batch_size=8)
QWEN2_WINDOW = dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=4)


def section(path: Path | str, tier: TierCase = TORCH, **fields: object) -> ModelConfigSection:
    return ModelConfigSection(path=str(path), num_threads=1, device="cpu", kernels=tier.kernels, **fields)


def load(path: Path | str, tier: TierCase = TORCH, **fields: object) -> ModelInfo:
    return InProcessWorkerGroup(section(path, tier, **fields), SCHEDULER).load()


def greedy(driver: Driver) -> list[int]:
    driver.begin(0, [3, 1, 4, 1, 5])
    driver.run(0, [5])
    driver.generate([0], 15)
    return driver.tokens[0]


@pytest.fixture
def directory(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may spoil."""
    return Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "DELETE"}))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.feature("000-01")
def test_a_directory_is_loaded_and_described(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    info = load(checkpoint("llama2"), tier, dtype="bfloat16", max_seq_len=100)
    assert (info.vocab_size, info.max_seq_len, info.sliding_window, info.eos_ids) == (131, 100, None, (1,))
    head_dim = 32 if tier is NATIVE else 8  # native blocks are padded to whole panels
    assert info.kv_bytes_per_token == 3 * 2 * 2 * head_dim * 2  # layers, key and value, kv heads, head_dim, bytes
    assert (info.dtype, info.device, info.kernels) == ("bfloat16", "cpu", tier.kernels)


def test_more_positions_than_the_model_has_are_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="max_seq_len is 100000, the model's own limit is 512"):
        load(checkpoint("llama2"), max_seq_len=100_000)


@pytest.mark.parametrize("name, window", [("mistral", 24), ("qwen2_window_from_second_layer", None), ("qwen2", None)])
def test_a_window_is_reported_only_when_every_layer_has_one(
    checkpoint: Callable[[str], Path], name: str, window: int | None
) -> None:
    assert load(checkpoint(name)).sliding_window == window


@pytest.mark.feature("000-01")
@pytest.mark.parametrize("path", ["Bla", "/no/such/model", "./bla/blub"])
def test_a_missing_path_is_told(path: str) -> None:
    with pytest.raises(ConfigError, match="File does not exist"):
        load(path)


def test_a_hub_id_that_cannot_be_fetched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="no/such-name: there is no such directory, and the hub could not be asked"):
        load("no/such-name")


@pytest.mark.feature("000-02")
@pytest.mark.parametrize("name", ["llama2", "llama3_tied_sharded", "qwen3"])
def test_buffers_and_directory_give_the_same_tokens(
    checkpoint: Callable[[str], Path], tier: TierCase, name: str
) -> None:
    directory = checkpoint(name)
    weights = {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}
    json_config = (directory / "config.json").read_text()
    buffers = InProcessWorkerGroup.from_buffers(weights, json_config, section("", tier, dtype="float32"), SCHEDULER)
    from_buffers, from_directory = GroupDriver(buffers, tier.block), GroupDriver.of(directory, tier)
    assert greedy(from_buffers) == greedy(from_directory)
    assert from_buffers.info.eos_ids == from_directory.info.eos_ids == (1,)


def test_eos_ids_come_from_the_generation_config_first(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_eos_ids(directory) == (7, 8)
    (directory / "generation_config.json").write_text("{}")
    assert read_eos_ids(directory) == (1,)
    (directory / "generation_config.json").unlink()
    edit_config(directory, eos_token_id=None)
    assert read_eos_ids(directory) == ()


def test_the_dtype_is_the_checkpoint_s_own_unless_another_is_asked_for(directory: Path) -> None:
    edit_weights(directory, lambda weights: weights.update({k: v.half() for k, v in weights.items()}))
    edit_config(directory, dtype="DELETE")
    assert load(directory).dtype == "float16"
    edit_config(directory, torch_dtype="bfloat16")
    assert load(directory).dtype == "bfloat16"
    assert load(directory, dtype="float32").dtype == "float32"
    edit_config(directory, torch_dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match="float8_e4m3fn is not supported; use one of float32"):
        load(directory)


def test_the_older_spelling_of_rope_is_read() -> None:
    raw = dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    old = raw | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = raw | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    assert parse_model_config(json.dumps(old)) == parse_model_config(json.dumps(new))
    assert parse_model_config(json.dumps(old)).ropes[0].theta == 5e5
    plain = parse_model_config(json.dumps(raw | {"rope_theta": 7e5, "rope_scaling": None}))
    assert (plain.ropes[0].kind, plain.ropes[0].theta, plain.num_kv_heads) == ("default", 7e5, 2)


@pytest.mark.feature("001-29")
@pytest.mark.parametrize(
    "architecture, changes, windows",
    [
        ("Qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1), (None, 4, 4)),
        (
            "Qwen3",
            dict(use_sliding_window=True, sliding_window=4),
            (None, None, None),
        ),  # 28 layers are without, by default
        ("Qwen2", dict(use_sliding_window=False, sliding_window=4, max_window_layers=1), (None, None, None)),
        ("Qwen2", dict(sliding_window=4, max_window_layers=0), (None, None, None)),
        ("Mistral", dict(sliding_window=4), (4, 4, 4)),
        ("Mistral", dict(sliding_window=None), (None, None, None)),
        ("Llama", dict(sliding_window=4), (None, None, None)),
    ],
)
def test_windows_of_configs_without_layer_types(
    architecture: str, changes: dict[str, object], windows: tuple[int | None, int | None, int | None]
) -> None:
    raw = dict(
        architectures=[f"{architecture}ForCausalLM"],
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    assert parse_model_config(json.dumps(raw | changes)).windows == windows


@pytest.mark.feature("001-60")
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(architectures=["T5"]), "T5 is not supported; docs/models.md lists the"),
        (
            dict(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True),
            "T5ForConditionalGeneration is not supported.*docs/models.md lists the",
        ),
        (
            dict(architectures=["WhisperForConditionalGeneration"]),
            "WhisperForConditionalGeneration is not supported.*docs/models.md lists the",
        ),
        (dict(quantization_config={"quant_method": "bitsandbytes"}), r"quantised \(bitsandbytes\)"),
        (dict(hidden_act="relu2"), "hidden_act relu2 is not supported here; supported are silu, swish, gelu,"),
        (
            dict(rope_parameters={"rope_type": "xpos", "factor": 2.0}),
            "xpos is not supported here; supported are default,",
        ),
        (
            dict(rope_parameters={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}),
            "lacks the key rope_parameters.low_freq_factor",
        ),
        (
            dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
            "lacks the key rope_parameters.original_max_position_embeddings",
        ),
        (dict(rope_parameters={"rope_type": "linear"}), "lacks the key rope_parameters.factor"),
        (dict(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (dict(vocab_size="DELETE"), "lacks the key vocab_size"),
        (dict(vocab_size="many"), "vocab_size is 'many', int is needed"),
        (dict(num_attention_heads="six"), "num_attention_heads is 'six', int is needed"),
        (dict(num_hidden_layers=0), "num_hidden_layers is 0, int >= 1"),
        (dict(num_key_value_heads=4), "6 is no multiple of num_key_value_heads 4"),
        (dict(head_dim=7), "head_dim is 7"),
        (dict(architectures=["MistralForCausalLM"], sliding_window=0), "sliding_window is 0, less than 1"),
        (
            QWEN2_WINDOW | dict(layer_types=["chunked_attention"] * 3),
            "layer type chunked_attention is not supported",
        ),
        (
            QWEN2_WINDOW | dict(layer_types=["full_attention"]),
            "layer_types has 1 entries for num_hidden_layers 3",
        ),
    ],
)
def test_a_config_that_asks_for_what_is_not_built_is_refused(
    directory: Path, changes: dict[str, object], message: str
) -> None:
    edit_config(directory, **changes)
    with pytest.raises(ConfigError, match=message):
        load(directory)


@pytest.mark.parametrize("text, message", [("{", "not JSON at line 1"), ("[]", "JSON object is expected")])
def test_a_config_that_is_no_json_object_is_refused(directory: Path, text: str, message: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(directory)


NORM, DOWN = "model.norm.weight", "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop(DOWN), f"lacks the tensor {DOWN}"),
        (lambda w: w.pop("lm_head.weight"), "lacks the tensor lm_head.weight"),
        (lambda w: w.update({"model.extra.weight": torch.ones(1)}), "1 tensors .* not used, model.extra.weight"),
        (lambda w: w.update({NORM: torch.ones(49)}), rf"{NORM} has shape \[49\], config.json asks for \[48\]"),
        (lambda w: w.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(48)}), "not used"),
    ],
)
def test_every_tensor_must_be_there_have_its_shape_and_be_used(
    directory: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit_weights(directory, change)
    with pytest.raises(ConfigError, match=message):
        load(directory)


def test_tensors_derived_from_the_config_may_be_there(directory: Path) -> None:
    edit_weights(directory, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert load(directory).vocab_size == 131


def test_a_tied_head_may_be_stored_but_must_not_differ(directory: Path) -> None:
    def tie(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    edit_config(directory, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="lm_head.weight differs from the one it is tied to"):
        load(directory)
    edit_weights(directory, tie)
    assert load(directory).vocab_size == 131


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pt"])
def test_pickle_weights_are_refused(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(ConfigError, match="pickle weights .* convert to safetensors"):
        load(directory)


def test_a_directory_without_weights_is_told(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="model.safetensors: File does not exist"):
        load(directory)


def test_a_file_that_is_cut_short_is_told(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="model.safetensors is cut short or too long"):
        load(directory)


def test_a_missing_shard_is_told(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama3_tied_sharded"), tmp_path / "model"))
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00003.safetensors: File does not exist"):
        load(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ConfigError, match="has no weight_map"):
        load(directory)


def test_the_same_seed_writes_the_same_model(tmp_path: Path) -> None:
    paths = [make_random_model(tmp_path / str(i), seed=seed) / "model.safetensors" for i, seed in enumerate((3, 3, 4))]
    contents = [path.read_bytes() for path in paths]
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.feature("004-27")
@pytest.mark.parametrize("shape", [(24,), (24, 5), (24, 2, 3)])
def test_the_rotary_permutation_and_its_inverse_are_the_identity(shape: tuple[int, ...]) -> None:
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    for num_heads in (1, 2, 3, 4):
        assert torch.equal(meta_to_hf(hf_to_meta(weight, num_heads), num_heads), weight)
        assert torch.equal(hf_to_meta(meta_to_hf(weight, num_heads), num_heads), weight)


@pytest.mark.feature("004-27")
def test_row_scales_of_a_quantised_weight_go_with_their_rows() -> None:
    weight = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    scales = weight.abs().amax(1, keepdim=True) / 127
    quantised = (weight / scales).round().to(torch.int8)
    converted = hf_to_meta(quantised, 3).float() * hf_to_meta(scales, 3)
    assert torch.equal(converted, hf_to_meta(quantised.float() * scales, 3))
    assert not torch.equal(hf_to_meta(scales, 3), scales)


@pytest.mark.feature("004-27")
def test_meta_rotates_neighbours_where_hugging_face_rotates_halves() -> None:
    """One head, position 1: rotating neighbours of the Meta form equals rotating halves of the HF form, permuted."""
    hf = torch.randn(8, generator=torch.Generator().manual_seed(1))
    angles = 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8)
    first, second = hf[:4], hf[4:]
    hf_rotated = torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))
    pairs = torch.view_as_complex(hf_to_meta(hf, 1).view(4, 2)) * torch.polar(torch.ones(4), angles)
    torch.testing.assert_close(torch.view_as_real(pairs).flatten(), hf_to_meta(hf_rotated, 1))


@pytest.mark.feature("004-27")
@pytest.mark.parametrize("name", ["llama2", "llama3_tied_sharded"])
def test_weights_brought_back_from_the_meta_layout_give_the_same_logits(
    checkpoint: Callable[[str], Path], name: str
) -> None:
    directory = checkpoint(name)
    weights = {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}
    config = json.loads((directory / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def convert(tensors: dict[str, Tensor], permute: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
        rotary = {name: heads.get(name.split(".")[-2]) for name in tensors}
        return {name: permute(t, rotary[name]).contiguous() if rotary[name] else t for name, t in tensors.items()}

    meta = convert(weights, hf_to_meta)
    back = convert(meta, meta_to_hf)

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        group = InProcessWorkerGroup.from_buffers(tensors, json.dumps(config), section("", dtype="float32"), SCHEDULER)
        driver = GroupDriver(group, TORCH.block)
        driver.begin(0, [3, 1, 4, 1, 5, 9, 2, 6])
        return driver.run(0, [8])

    assert torch.equal(logits(back), logits(weights))
    assert not torch.allclose(logits(meta), logits(weights), atol=1e-2)
