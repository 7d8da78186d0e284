"""LoRA adapters over quantised weights and quantised KV. PEFT is the oracle, over the numbers that the weights stand for.

Sums of another order differ by a millionth. A number that lies half-way between two steps of int8 may then round the other way,
which changes its token's logits, and those of later tokens, by a hundredth: a few in a hundred tokens. So most rows must agree to
the millionth, and all together to a few hundredths. A part that was computed from rounded inputs would be off in every row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from backend.api import EngineConfig, OutputConfig, Request
from backend.api.config.kv_bits import named
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig
from backend.api.lora import LoraConfig
from backend.executor import Executor
from backend.models.loader import open_directory
from backend.quant.importance import Importance
from kernels.common import rotation
from kernels.common.quantize import DEFAULT_GROUPS, dequantize, quantize_activations, quantize_weight
from kernels.common.rounding import GROUP, ROUNDED, floats, round_weight
from kernels.cpu.library import load_kernels
from kernels.cpu.linear import RoundToBlocks
from tests.executor.helpers import drain
from tests.model.adapters import make_adapter
from tests.model.gathering import tensor_of
from tests.model.tiers import NATIVE, TierCase
from tests.quant.models import WIDE
from tools.make_random_model import make_random_model

PROMPTS = [[(7 * i + 13 * start) % 120 for i in range(6)] for start in range(8)]


class Scheme(NamedTuple):
    round: Any  # (weight, group) -> rounded weight and scales; with a name (weight, name, importance)
    group: int | None  # columns that share a scale; None: inputs are rotated, and rotation.group_of says it
    rounds_inputs: bool = True
    name: str = ""  # of ROUNDED


SCHEMES = {
    "int8": Scheme(quantize_weight, DEFAULT_GROUPS["int8"], rounds_inputs=False),
    "w8a8": Scheme(quantize_weight, None),
    **{name: Scheme(round_weight, GROUP, name=name) for name in ROUNDED},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("base"), "llama", **WIDE)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base, root / "all", 1), make_adapter(base, root / "odd", 2, rank=7)]


def assert_agree(ours: Tensor, theirs: Tensor, share: float) -> None:
    """Logits [prompts, tokens, vocab]: that share of the rows to 1e-5 of their norm, and all together to 0.03."""
    errors = (ours - theirs).norm(dim=2) / theirs.norm(dim=2)
    assert (errors < 1e-5).float().mean() >= share
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


def logits_of(
    base: Path, tier: TierCase, loras: list[LoraConfig | None], quantization: str = "none", kv: str = "auto"
) -> list[Tensor]:
    """The logits [prompts, tokens, vocab] of PROMPTS with each adapter, all in one batch, in chunks of at most two tokens."""
    config = EngineConfig(
        ModelConfigSection(
            **dict(dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1, quantization=quantization),
            gather_context_logits=True,
        ),
        KvCacheConfig(block_size=tier.block, max_tokens=2048, **named(kv)),
        SchedulerConfig(max_batch_size=32, max_num_tokens=64, max_chunk_tokens=2),
        lora=LoraSection(enabled=True),
    )
    output = OutputConfig(return_context_logits=True)
    requests = [Request(prompt, 1, output_config=output, lora=lora) for lora in loras for prompt in PROMPTS]
    with Executor.from_directory(base, config) as executor:
        ids = executor.enqueue_requests(requests)
        got = drain(executor, ids)
    assert not any(got[request_id][-1].has_error() for request_id in ids), got
    rows = torch.stack([tensor_of(got[request_id][-1].result.context_logits) for request_id in ids])
    return list(rows.chunk(len(loras)))


def quantise(model: nn.Module, scheme: Scheme, importance: Callable[[str], Tensor | None]) -> None:
    """Every linear layer stands for what its rounded weight is. (Of those in ROUNDED the head has eight bits, and is rotated.)"""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            has_eight_bits = name.endswith("lm_head") and scheme.rounds_inputs
            of_layer = Scheme(quantize_weight, None) if has_eight_bits else scheme
            quantise_layer(module, of_layer, importance(name) if of_layer.name else None)


def quantise_layer(module: nn.Linear, scheme: Scheme, importance: Tensor | None) -> None:
    """Weight and inputs become what their rounded forms stand for; a second rotation takes the first back."""
    group = scheme.group
    turn = back = lambda x: x
    if scheme.name:
        assert importance is not None
        weight = floats(scheme.round(module.weight.detach(), scheme.name, importance))
    elif group is not None:
        weight = dequantize(*scheme.round(module.weight.detach(), group), group)
    else:
        block, group = rotation.block_of(module.in_features), rotation.group_of(module.in_features)
        assert group is not None
        turn, back = rotation.rotate, lambda x: rotation.rotate(x) / block
        rounded = rotation.round_weight(module.weight.detach(), group, rounded=scheme.round)
        weight = dequantize(rounded[0], rounded[1] * block, group)  # round_weight divides by it

    def round_inputs(module: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        x = turn(given[0].flatten(0, -2))
        return back(dequantize(*quantize_activations(x, group), group)).view(given[0].shape)

    with torch.no_grad():
        module.weight.copy_(back(weight))
    if scheme.rounds_inputs:
        module.register_forward_pre_hook(round_inputs)


@torch.inference_mode()
def expected_logits(base: Path, scheme: Scheme, adapter: Path | None) -> Tensor:
    """PEFT's layers compute the adapter's part from the inputs as they are, and give them to the base layer besides."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    checkpoint = open_directory(base)
    quantise(model, scheme, Importance(base, checkpoint.config, checkpoint.tensors, lambda line: None))
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    return model(torch.tensor(PROMPTS)).logits


@pytest.mark.feature("000-19")
@pytest.mark.parametrize("name", SCHEMES)
def test_the_result_is_the_quantised_base_and_the_adapters_part(
    name: str, base: Path, adapters: list[Path], tier: TierCase
) -> None:
    scheme = SCHEMES[name]
    if tier is NATIVE and name in ROUNDED:  # its search for scales finds others that are as good
        scheme = scheme._replace(round=RoundToBlocks(load_kernels()))
    paths = [*adapters, None]
    loras = [None if path is None else LoraConfig(index, path=str(path)) for index, path in enumerate(paths)]
    measured = logits_of(base, tier, loras, quantization=name)
    expected = [expected_logits(base, scheme, path) for path in paths]
    for ours, theirs in zip(measured, expected, strict=True):
        assert_agree(ours, theirs, share=0.6 if scheme.rounds_inputs else 1.0)
    assert (expected[0] - expected[2]).norm() > 0.1 * expected[2].norm(), "the adapter hardly matters"


def merged(base: Path, adapter: Path, directory: Path) -> Path:
    """The checkpoint whose weights are W + scale B A."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(directory)
    return directory


@pytest.mark.feature("000-19")
@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4"])
def test_quantised_kv_holds_the_adapters_keys_and_values(
    kv: str, base: Path, adapters: list[Path], tmp_path: Path, tier: TierCase
) -> None:
    """As it does those of merged weights."""
    measured = logits_of(base, tier, [LoraConfig(i, path=str(path)) for i, path in enumerate(adapters)], kv=kv)
    floats = logits_of(base, tier, [LoraConfig(0, path=str(adapters[0]))])[0]
    for index, ours in enumerate(measured):
        (expected,) = logits_of(merged(base, adapters[index], tmp_path / str(index)), tier, [None], kv=kv)
        assert_agree(ours, expected, share=0.6)
    assert (measured[0] - floats).norm() > 0.002 * floats.norm(), "KV was not quantised"
