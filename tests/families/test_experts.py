"""Mixtures of experts: how a router's logits become experts and weights, MXFP4 experts, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api import ConfigError
from backend.api.checkpoint.gguf import GgufHeader
from backend.architectures.description import Experts
from backend.architectures.gguf.routers import SIGMOID, SOFTMAX, check_router
from backend.architectures.gguf.settings import GgufSettings
from backend.architectures.registry import read_config
from backend.layers.experts import choose
from backend.models.linears import LinearOptions
from backend.models.loader import load_directory, open_tensors
from backend.models.mxfp4 import Mxfp4Layers
from backend.models.tensors import TensorSource
from kernels.common import super_blocks
from kernels.common.quantize import dequantize
from tests.families.test_transformers import log_probs, oracle
from tests.families.tiny import FAMILIES, VOCAB, make
from tests.model.driver import GroupDriver
from tests.model.tiers import TierCase
from tests.native.harness import prompt
from tools.make_random_model import TINY

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LENGTH = 40


def test_the_lowest_of_equal_experts_is_chosen_first() -> None:
    chosen, weights = choose(torch.zeros(1, 6), Experts(6, 3, 8), None)
    assert chosen.tolist() == [[0, 1, 2]] and weights.tolist() == [[pytest.approx(1 / 3)] * 3]


def test_a_bias_of_the_choice_is_not_in_the_weights() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    chosen, weights = choose(logits, Experts(4, 2, 8, scores="sigmoid", scale=2.0), bias)
    scores = logits.sigmoid()[0]
    assert chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(weights[0], 2 * scores[[3, 0]] / scores[[3, 0]].sum())


def test_groups_count_by_their_best_or_by_their_two_best() -> None:
    logits = torch.tensor([[4.0, -9.0, 3.0, 2.9, 0.0, 0.0]])  # in groups of two
    one = Experts(6, 2, 8, scores="sigmoid", is_normalised=False, groups=3, kept_groups=1)
    assert choose(logits, one, None).experts.tolist() == [[0, 1]]
    two = Experts(6, 2, 8, scores="sigmoid", is_normalised=False, groups=3, kept_groups=1, adds_two_best=True)
    assert choose(logits, two, None).experts.tolist() == [[2, 3]]


def in_mxfp4(directory: Path) -> Path:
    """Give a gpt-oss random experts in the published form; returns a checkpoint with the same experts in floats."""
    file, rng = directory / "model.safetensors", torch.Generator().manual_seed(3)
    floats, packed = load_file(file), {}
    for name, weight in list(floats.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = weight
            continue
        experts, columns, rows = weight.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, rows, columns // 32), generator=rng, dtype=torch.uint8)
        values = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(-2)
        whole: Tensor = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
        floats[name] = whole.transpose(1, 2).contiguous()
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
    plain = directory.with_name("floats")
    plain.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(floats, plain / file.name, metadata={"format": "pt"})
    save_file(packed, file, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return plain


def test_mxfp4_experts_are_those_of_floats(tmp_path: Path, tier: TierCase) -> None:
    """On the native tier inputs are rounded to int8 besides, in groups of 32."""
    directory = make(tmp_path / "packed", "gpt-oss", hidden_size=64, intermediate_size=64)
    plain = in_mxfp4(directory)
    driver = GroupDriver.of(directory, tier)
    tokens = prompt(LENGTH, VOCAB, seed=1)
    driver.begin(0, tokens)
    measured = log_probs(driver.run(0, [LENGTH]))
    expected = log_probs(oracle(plain).logits(tokens))
    difference = (measured - expected).abs()
    assert difference.max() <= 1e-4 if tier.kernels == "torch" else difference.mean() <= 0.05


def test_mxfp4_is_the_same_numbers_in_eight_bits_and_as_floats_on_a_gpu() -> None:
    rng = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (3, 2, 16), generator=rng, dtype=torch.uint8)
    tensors = {"x.blocks": blocks, "x.scales": torch.randint(120, 130, (3, 2), generator=rng, dtype=torch.uint8)}
    assert Mxfp4Layers.held_on(torch.device("cuda"), False).held == "floats"
    taken = {}
    for held in ("blocks", "int8", "floats"):
        source = TensorSource(tensors, torch.float32, torch.device("cpu"))
        taken[held] = Mxfp4Layers(held).take(source, "x", 3, 64)
    expected = super_blocks.floats(taken["blocks"])
    assert expected.abs().max() > 0
    torch.testing.assert_close(dequantize(*taken["int8"][:3]), expected, rtol=0, atol=0)
    torch.testing.assert_close(taken["floats"], expected, rtol=0, atol=0)


def test_what_mxfp4_experts_cannot_be_is_told_by_their_own_name(tmp_path: Path) -> None:
    directory = make(tmp_path / "packed", "gpt-oss", hidden_size=64, intermediate_size=64)
    in_mxfp4(directory)
    for quantization in ("int8", "w8a8"):
        options = LinearOptions(quantization=quantization)
        with pytest.raises(
            ConfigError, match=f"quantization is {quantization}, but the checkpoint is quantised as mxfp4"
        ):
            load_directory(directory, None, "float32", torch.device("cpu"), options)


def test_a_file_that_becomes_shorter_is_told(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(100_000)}, file)
    tensors = open_tensors([file])
    file.write_bytes(file.read_bytes()[:5000])
    assert tensors["a"].tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match="model.safetensors has become shorter since its header was read"):
        tensors["b"]


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("Ernie4_5_MoeForCausalLM", dict(moe_num_shared_experts=-1), "moe_num_shared_experts"),
        ("Glm4MoeForCausalLM", dict(n_shared_experts=10**400), "n_shared_experts"),
        ("Dots1ForCausalLM", dict(routed_scaling_factor=float("inf")), "routed_scaling_factor"),
        ("GptOssForCausalLM", dict(sliding_window=None), "lacks the key sliding_window"),
        ("GptOssForCausalLM", dict(swiglu_limit=5.0), "swiglu_limit 5.0 is not supported"),
    ],
)
def test_settings_of_mixtures_that_are_not_served_are_told(
    architecture: str, changes: dict[str, object], sentence: str
) -> None:
    kind = next(kind for kind, name, _ in FAMILIES.values() if name == architecture)
    own = {key: value for _, name, keys in FAMILIES.values() if name == architecture for key, value in keys.items()}
    content = TINY | own | dict(architectures=[architecture], model_type=kind)
    read_config(content)
    with pytest.raises(ConfigError, match=sentence):
        read_config(content | changes)


@pytest.mark.parametrize(
    ("normalises", "scores", "said", "key"),
    [
        (True, SOFTMAX, {}, ""),
        (True, SOFTMAX, {"expert_gating_func": 1, "expert_weights_norm": True}, ""),
        (True, SOFTMAX, {"expert_gating_func": 3}, ""),
        (False, SOFTMAX, {"expert_gating_func": 3}, "expert_gating_func"),
        (True, SOFTMAX, {"expert_gating_func": 2}, "expert_gating_func"),
        (True, SOFTMAX, {"expert_weights_norm": False}, "expert_weights_norm"),
        (False, SOFTMAX, {"expert_weights_norm": True}, "expert_weights_norm"),
        (True, SIGMOID, {"expert_gating_func": 1}, "expert_gating_func"),
        (True, SIGMOID, {"expert_gating_func": 2}, ""),
    ],
)
def test_a_gguf_file_s_router_is_the_family_s_or_refused(
    normalises: bool, scores: int, said: dict[str, object], key: str
) -> None:
    header = GgufHeader(Path("x.gguf"), {f"qwen3moe.{name}": value for name, value in said.items()}, {})
    settings = GgufSettings(header, "qwen3moe")
    if not key:
        return check_router(settings, normalises, scores)
    with pytest.raises(ConfigError, match=rf"x.gguf: qwen3moe.{key} is .*, which is not supported"):
        check_router(settings, normalises, scores)


def test_a_checkpoint_that_is_silent_is_read_as_transformers_reads_it() -> None:
    """GLM 4.5 divides weights by their sum, has a shared expert and one dense layer; dots.llm1 none of these."""
    base = {**TINY, "head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    glm = read_config(base | dict(architectures=["Glm4MoeForCausalLM"]))
    dots = read_config(base | dict(architectures=["Dots1ForCausalLM"]))
    assert glm.experts is not None and dots.experts is not None
    assert (glm.experts.is_normalised, glm.experts.shared, glm.layers[0].has_experts) == (True, 40, False)
    assert (dots.experts.is_normalised, dots.experts.shared, dots.layers[0].has_experts) == (False, 0, True)
    extra = read_config(base | dict(architectures=["Glm4MoeForCausalLM"], num_nextn_predict_layers=2))
    assert [bool(re.fullmatch("|".join(extra.names.unused), f"model.layers.{n}.x")) for n in (2, 3, 4, 5)] == [
        *(False, True, True, False)
    ]


def test_a_damaged_exponent_and_a_tensor_that_lacks_are_told(tmp_path: Path) -> None:
    directory = make(tmp_path / "packed", "gpt-oss", hidden_size=64, intermediate_size=64)
    in_mxfp4(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][2, 3, 1] = 255
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"experts\.2\.down_proj\.scales holds an exponent that is no number"):
        load_directory(directory, None, "float32", torch.device("cpu"))
    tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks the tensor {name}"):
        load_directory(directory, None, "float32", torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(num_experts_per_tok=9), "num_experts_per_tok is 9, num_experts 8"),
        (dict(num_experts=0), "num_experts is 0"),
        (dict(moe_intermediate_size=None), "lacks the key moe_intermediate_size|moe_intermediate_size"),
        (dict(num_experts=2**50), "num_experts is 1125899906842624"),
    ],
)
def test_numbers_of_experts_that_do_not_fit_are_told(changes: dict[str, object], sentence: str) -> None:
    content = dict(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=131,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=512,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    read_config(content)
    with pytest.raises(ConfigError, match=sentence):
        read_config(content | changes)
