"""LoRA adapters of models that transformers runs. PEFT is the oracle, in float32; a token's bits never depend on other adapters.

By default a sample of the families; EVERBATCH_EVERY=1 runs all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from peft.utils import transformers_weight_conversion
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from backend.api import ErrorCode
from backend.api.checkpoint.adapter_files import projection_of
from backend.api.errors import Unsupported
from backend.api.lora import LoraConfig
from backend.architectures.hosted import HOSTED
from backend.core.step import PreparedAdapter, StepInput
from backend.executor import Executor
from backend.hosted.adapters import AdapterHost
from backend.hosted.layers import engine_linear
from backend.models.linears import LinearOptions
from backend.models.lora import read_adapter
from kernels.cpu.lora import PackedAdapter, TokenAdapters
from tests.hosted.harness import hosted_driver
from tests.hosted.tiny import COMMON, save, tiny_model
from tests.model.adapters import as_rows
from tests.model.driver import Driver
from tests.model.test_lora import NUM_TOKENS, PROMPTS, config, error_of, request, run
from tests.model.tiers import TierCase
from tests.native.harness import Format, prompt, threads
from tests.native.test_invariance import assert_same

# Attention of a mixture of experts; fused queries, keys and values with biases; Conv1D; biases; latent attention with shared
# experts; heads and layers that differ; a router that is float32 in every model.
SAMPLE = ("qwen3_moe", "gpt_neox", "gpt2", "phi", "deepseek_v3", "gemma4_text", "mimo_v2_flash", "hunyuan_v1_moe")
KINDS = sorted(set(HOSTED.values())) if "EVERBATCH_EVERY" in os.environ else SAMPLE
FORMATS = [Format("float32"), Format("bfloat16"), Format("bfloat16", "w8a8", kv="int8")]
TOKENS = [3 + token for token in prompt(40, COMMON["vocab_size"] - 3)]
NUM_NEW = 4  # tokens


class Adapter(NamedTuple):
    """What PEFT has written, and what transformers and PEFT make of it."""

    path: Path
    model: PeftModel

    @property
    def logits(self) -> Tensor:
        """Of TOKENS."""
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
        return logits

    def greedy(self, is_adapted: bool = True) -> list[int]:
        """The tokens behind PROMPTS[1]."""
        tokens = list(PROMPTS[1])
        with torch.inference_mode(), nullcontext() if is_adapted else self.model.disable_adapter():
            for _ in range(NUM_TOKENS):
                logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
        return tokens[len(PROMPTS[1]) :]


class Made(NamedTuple):
    directory: Path  # of the checkpoint
    adapters: list[Adapter]


def projections(model: nn.Module) -> list[str]:
    """Names of all linear layers in numbered layers, without experts."""
    plain = (nn.Linear.forward, Conv1D.forward)  # without classes that compute something else
    linears = [name for name, module in model.named_modules() if type(module).forward in plain]
    return [name for name in linears if projection_of(name)]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @cache
    def make(kind: str) -> Made:
        root = tmp_path_factory.mktemp(kind.replace("-", "_"))
        save(tiny_model(kind), root / "model")
        return Made(root / "model", [_adapter(kind, root / str(rank), rank) for rank in (4, 7)])

    return make


def _adapter(kind: str, directory: Path, rank: int) -> Adapter:
    model = tiny_model(kind)
    adapter = PeftConfig(r=rank, lora_alpha=2 * rank, target_modules=projections(model))
    # PEFT takes every name such as gate_proj for one of experts where a family has experts.
    with patch.object(transformers_weight_conversion, "convert_peft_config_for_transformers"):
        peft_model = get_peft_model(model, adapter).eval()
    torch.manual_seed(rank)
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.4 * torch.randn_like(weight) / weight.shape[1] ** 0.5)
    peft_model.save_pretrained(directory)
    return Adapter(directory, peft_model)


def hold(driver: Driver, directory: Path, content: str, library: CDLL | None) -> None:
    """Make an adapter known to the driver's tier by the name `content`."""
    model = driver.runner.tier.model
    layers = read_adapter(LoraConfig(1, path=str(directory)), model.adapters.projections, model.dtype, 64)
    weights = layers if library is None else PackedAdapter(layers, model.dtype)
    prepared = PreparedAdapter(content, 64, 1, 1, weights)
    driver.runner.tier.adapters.update(StepInput(0, [], adapters_in=[prepared]))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(made: Callable[[str], Made], kernels: CDLL, kind: str) -> None:
    """Of adapters of all linear layers, beside each other in one batch."""
    directory, adapters = made(kind)
    for library in (None, kernels):
        driver = hosted_driver(directory, library, Format(), takes_adapters=True)
        for index, adapter in enumerate(adapters):
            hold(driver, adapter.path, str(index), library)
            driver.begin(index, TOKENS, adapter=str(index))
        parts = [driver.step([(0, chunk), (1, chunk)]) for chunk in (7, 13, len(TOKENS) - 20)]
        for index, adapter in enumerate(adapters):
            expected = adapter.logits
            measured = torch.cat([part[index] for part in parts])
            assert (measured.log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= 1e-4
            assert measured.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_beside_any_adapters(
    made: Callable[[str], Made], kernels: CDLL, kind: str, form: Format
) -> None:
    """Prompts with either adapter and with none: whole and alone, in chunks beside each other, and again after an eviction."""
    directory, adapters = made(kind)
    driver = hosted_driver(directory, kernels, form, takes_adapters=True, num_blocks=64)
    driver.begin(0, TOKENS)
    plain = driver.run(0, [len(TOKENS)])  # no adapter is held yet
    alone = [plain]
    for index, adapter in enumerate(adapters):
        hold(driver, adapter.path, str(index), kernels)
        driver.begin(0, TOKENS, adapter=str(index))
        alone.append(driver.run(0, [len(TOKENS)]))
    assert not any(torch.equal(alone[a], alone[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    contents = ["", "0", "1"]
    with threads(1):
        for slot, content in enumerate(contents):
            driver.begin(slot, TOKENS, adapter=content)
        driver.begin(3, TOKENS[5:30], adapter="0")
        chunks = (1, 9, len(TOKENS) - 10)
        parts = [driver.step([(2, chunk), (0, chunk), (3, 5), (1, chunk)]) for chunk in chunks]
    for slot, expected in enumerate(alone):
        assert_same(torch.cat([part[slot] for part in parts]), expected)
    generated = driver.generate([0, 1, 2], NUM_NEW)
    for slot, content in enumerate(contents):
        known = driver.tokens[slot]
        driver.begin(4, known[:-1], adapter=content)  # evicted, and computed again in one piece
        assert_same(driver.run(4, [len(known) - 1]), torch.cat((alone[slot], generated[slot])))


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_but_experts_takes_adapters(made: Callable[[str], Made], kind: str) -> None:
    driver = hosted_driver(made(kind).directory, None, Format())
    found = driver.runner.tier.model.adapters.projections
    names = {(layer, name) for layer, places in enumerate(found.layers) for name in places}
    expected = [projection_of(name) for name in projections(tiny_model(kind))]
    assert names == set(expected) and len(names) == len(expected)


class HeadsOfTwoTokens(nn.Module):
    """Two numbered layers, each with a layer for tokens, one for heads, and one that is not reached."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(4, 4)
        layers = [
            {name: engine_linear(weight, None, LinearOptions()) for name in ("up", "head", "spare")} for _ in "12"
        ]
        self.layers = nn.ModuleList(nn.ModuleDict(each) for each in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["head"](layer["up"](x)[:, :, None].repeat(1, 1, 3, 1)).sum(2)
        return x


def test_layers_that_do_not_read_a_row_for_each_token_take_no_adapters() -> None:
    module = HeadsOfTwoTokens()
    host = AdapterHost(module, "Nonesuch")
    with host.learning(num_tokens=2):
        module(torch.ones(1, 2, 4))
    host.enable()
    assert [[*places] for places in host.projections.layers] == [["up"], ["up"]]
    host.step = TokenAdapters(CDLL(None), [], [], threads=1)  # it refuses rows of another number
    with pytest.raises(AssertionError, match="2 rows for 0 tokens"):
        module(torch.ones(1, 2, 4))
    with pytest.raises(
        Unsupported, match="it has head, which Nonesuch does not have, or takes no adapters for; .* for up"
    ):
        host.projections.place(0, "head")


def test_modules_that_adapters_change_are_native_only_where_none_are_served(
    made: Callable[[str], Made], kernels: CDLL
) -> None:
    directory = made("qwen3_moe").directory
    with_adapters, without = (
        hosted_driver(directory, kernels, Format(), takes_adapters=takes).runner.tier.model.natives.found
        for takes in (True, False)
    )
    assert without.keys() - with_adapters.keys() == {"Qwen3MoeAttention"}
    assert with_adapters.keys() >= {"Qwen3MoeExperts", "Qwen3MoeRMSNorm"}


@pytest.mark.feature("000-19", "002-45")
def test_requests_with_adapters_are_served(made: Callable[[str], Made], tier: TierCase) -> None:
    """As a directory, as TensorRT-LLM's tensors, and by the id alone; beside requests without one."""
    directory, adapters = made("qwen3_moe")
    expected = [adapters[0].greedy(), adapters[1].greedy(), adapters[0].greedy(is_adapted=False)]
    assert len({tuple(tokens) for tokens in expected}) == 3
    with Executor.from_directory(directory, config(tier)) as executor:
        loras = [LoraConfig(1, path=str(adapters[0].path)), as_rows(adapters[1].path, 2), None]
        for given in (loras, [LoraConfig(1), LoraConfig(2), None]):
            assert run(executor, *(request(PROMPTS[1], lora) for lora in given)) == expected


def test_an_adapter_of_experts_is_refused_in_one_sentence(made: Callable[[str], Made], tmp_path: Path) -> None:
    directory, adapters = made("qwen3_moe")
    path = tmp_path / "adapter_model.safetensors"
    (tmp_path / "adapter_config.json").write_bytes((adapters[0].path / "adapter_config.json").read_bytes())
    name = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"
    save_file({**load_file(adapters[0].path / path.name), name: torch.ones(4, 64)}, path)
    with Executor.from_directory(directory, config(TierCase("torch", 4))) as executor:
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(1, path=str(tmp_path))))
    assert code is ErrorCode.UNSUPPORTED
    assert message.endswith(f"tensor {name} changes experts, for which no adapters are served; train one without them")


def test_an_adapter_of_another_model_is_told_what_this_one_takes(made: Callable[[str], Made]) -> None:
    directory = made("gpt2").directory
    path = made("qwen3_moe").adapters[0].path
    with Executor.from_directory(directory, config(TierCase("torch", 4))) as executor:
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(1, path=str(path))))
    assert code is ErrorCode.UNSUPPORTED
    assert (
        "which GPT2LMHeadModel does not have, or takes no adapters for; in layer 0 it takes them for attn.c_attn"
        in message
    )
