"""Linear layers while a model is loaded: what is quantised, in which order it is stacked, and what is let go when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from backend.layers.linear import DenseLinear, Linear, QuantizedLinear, QuantizedWeight, make_torch_linear
from backend.models.decoder import Decoder
from backend.models.linears import WHOLE_ROW, LinearOptions
from backend.models.loader import load_directory, of_buffers
from benchmarks.quality.perplexity import row_logits
from kernels.common.quantize import DEFAULT_GROUPS, quantize_weight
from kernels.common.rounding import GROUP, ROUNDED, round_weight
from tests.weight_formats.checkpoints import ODD
from tools.make_random_model import make_random_model

CPU = torch.device("cpu")
ROWS = torch.randint(131, (2, 40), generator=torch.Generator().manual_seed(0))
NAMES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class Recorder:
    """Makes torch's layers, and keeps what it was asked to make them of."""

    def __init__(self) -> None:
        self.weights: list[Tensor | QuantizedWeight] = []
        self.biases: list[Tensor | None] = []

    def __call__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        self.weights.append(weight)
        self.biases.append(bias)
        return make_torch_linear(weight, bias)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def write(family: str = "llama", **overrides: object) -> Path:
        return make_random_model(tmp_path_factory.mktemp(family), family, **overrides)

    return write


def load(directory: Path, dtype: str = "float32", **options: object) -> Decoder:
    return load_directory(directory, None, dtype, CPU, LinearOptions(**options))


def stacked(weights: dict[str, Tensor], layer: int, names: tuple[str, ...], suffix: str = ".weight") -> Tensor:
    return torch.cat([weights[f"model.layers.{layer}.{name}{suffix}"] for name in names])


@pytest.mark.parametrize("format", ["int8", "w8a8", "w6a8", "w4a8"])
def test_every_linear_layer_is_quantised_from_its_stored_values(make: Callable[..., Path], format: str) -> None:
    directory, recorder = make(**ODD), Recorder()
    model = load(directory, "bfloat16", quantization=format, make=recorder)
    weights = load_file(directory / "model.safetensors")
    expected = [weights["lm_head.weight"]]
    expected += [stacked(weights, layer, names) for layer in range(3) for names in NAMES.values()]
    assert len(recorder.weights) == len(expected)
    for index, (measured, stored) in enumerate(zip(recorder.weights, expected)):
        held = "w8a8" if format in ROUNDED and index == 0 else format  # the output head stays in 8 bits
        group = GROUP if held in ROUNDED else DEFAULT_GROUPS[held]
        expected_parts = round_weight(stored, held) if held in ROUNDED else (*quantize_weight(stored, group), None)
        assert (measured.group, measured.format) == (group, held)
        for part, own in zip((measured.q, measured.scale, measured.minimum), expected_parts, strict=True):
            assert own is part is None or torch.equal(part, own)
    assert torch.equal(model.embedding, weights["model.embed_tokens.weight"].bfloat16())
    assert model.norm.weight.dtype == model.layers[0].attention_norm.weight.dtype == torch.bfloat16


def test_projections_are_stacked_in_a_fixed_order_with_their_biases(make: Callable[..., Path]) -> None:
    directory, recorder = make(**ODD, attention_bias=True, mlp_bias=True), Recorder()
    load(directory, make=recorder)
    weights = load_file(directory / "model.safetensors")
    assert torch.equal(recorder.weights[0], weights["lm_head.weight"])
    assert recorder.biases[0] is None
    made = iter(zip(recorder.weights[1:], recorder.biases[1:], strict=True))
    for layer in range(3):
        for names in NAMES.values():
            weight, bias = next(made)
            assert torch.equal(weight, stacked(weights, layer, names))
            assert torch.equal(bias, stacked(weights, layer, names, ".bias"))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_group_is_a_setting(make: Callable[..., Path], group: int) -> None:
    recorder = Recorder()
    load(make(), quantization="int8", group=group, make=recorder)
    assert {weight.group for weight in recorder.weights} == {group}
    assert {weight.scale.shape[1] for weight in recorder.weights} == {-(-columns // group) for columns in (48, 80)}


@pytest.mark.parametrize("family", ["llama", "llama3"])  # llama3's head is tied
def test_a_whole_row_may_share_a_scale(make: Callable[..., Path], family: str) -> None:
    directory, recorder = make(family), Recorder()
    load(directory, quantization="w8a8", group=WHOLE_ROW, make=recorder)
    assert {(weight.group, weight.q.shape[1]) for weight in recorder.weights} == {(48, 48), (80, 80)}
    assert {weight.scale.shape[1] for weight in recorder.weights} == {1}
    q, scale = quantize_weight(load_file(directory / "model.safetensors")["model.layers.0.mlp.down_proj.weight"], 80)
    assert any(torch.equal(weight.q, q) and torch.equal(weight.scale, scale) for weight in recorder.weights)


def test_a_tied_head_is_quantised_and_the_embedding_is_not(make: Callable[..., Path]) -> None:
    directory = make("llama3")
    model = load(directory, quantization="int8")
    weights = load_file(directory / "model.safetensors")
    assert type(model.lm_head) is QuantizedLinear
    assert torch.equal(model.embedding, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("format", ROUNDED)
def test_a_tied_head_stays_in_eight_bits_where_other_layers_have_fewer(make: Callable[..., Path], format: str) -> None:
    directory, recorder = make("llama3"), Recorder()
    load(directory, quantization=format, make=recorder)
    assert [weight.format for weight in recorder.weights] == ["w8a8"] + 12 * [format]


def test_each_layer_may_have_a_format_of_its_own(make: Callable[..., Path]) -> None:
    directory, recorder = make("llama3"), Recorder()
    choose = lambda name: "w6a8" if name.endswith("down_proj") else "w4a8"
    load(directory, quantization="auto:5", make=recorder, choose=choose)
    assert [weight.format for weight in recorder.weights] == ["w8a8", *3 * ["w4a8", "w4a8", "w4a8", "w6a8"]]


def test_a_tied_head_of_floats_shares_the_embedding(make: Callable[..., Path]) -> None:
    model = load(make("llama3"))
    assert type(model.lm_head) is DenseLinear
    with torch.inference_mode():
        model.embedding.zero_()
        assert model.lm_head(torch.ones(1, 48)).abs().sum() == 0


@pytest.mark.parametrize(
    "format, limit", [("int8", 0.045), ("w8a8", 0.065), ("w6a8", 0.25), ("w4a8", 0.5)]
)  # error of the logits, relative
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_a_quantised_model_stays_near_the_float_one(
    make: Callable[..., Path], family: str, format: str, limit: float
) -> None:
    directory = make(family, max_position_embeddings=64)
    measured, expected = (row_logits(load(directory, quantization=name), ROWS) for name in (format, "none"))
    error = ((measured - expected).norm() / expected.norm()).item()
    assert 0.005 < error < limit


@pytest.mark.parametrize("format", ["none", "int8", "w8a8", "w4a8"])
def test_buffers_and_directory_give_the_same_quantised_model(make: Callable[..., Path], format: str) -> None:
    directory = make("qwen2")
    config, options = (directory / "config.json").read_text(), LinearOptions(format)
    buffers = of_buffers(load_file(directory / "model.safetensors"), config).build(None, torch.float32, CPU, options)
    assert torch.equal(row_logits(buffers, ROWS), row_logits(load(directory, quantization=format), ROWS))


@pytest.mark.parametrize("format", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_holds_nothing_of_its_file(make: Callable[..., Path], dtype: str, format: str) -> None:
    """What was mapped would count as memory used, and would change with the file."""
    directory = make(dtype=dtype)
    model = load(directory, quantization=format)
    gc.collect()
    assert str(directory) not in Path("/proc/self/maps").read_text()
    before = row_logits(model, ROWS)
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(row_logits(model, ROWS), before)


@pytest.mark.parametrize("format", ["none", "int8"])
def test_a_weight_is_let_go_before_the_next_is_made(make: Callable[..., Path], format: str) -> None:
    earlier: list[weakref.ref[Tensor]] = []

    def pack(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        assert not [tensor for tensor in earlier if tensor() is not None], "an original outlived its packing"
        original = weight.q if isinstance(weight, QuantizedWeight) else weight
        earlier.append(weakref.ref(original))
        return make_torch_linear(torch.zeros(original.shape), bias)

    load(make(), quantization=format, make=pack)
    assert len(earlier) == 1 + 3 * 4


def test_the_bytes_that_a_step_reads_are_those_of_the_linear_layers(make: Callable[..., Path]) -> None:
    directory = make(dtype="bfloat16")
    counts = [131 * 48] + 3 * [(48 + 2 * 16) * 48, 48 * 48, 2 * 80 * 48, 48 * 80]
    assert load(directory, "bfloat16").num_linear_bytes == 2 * sum(counts)
    scales = [131] + 3 * [48 + 2 * 16, 48, 2 * 80, 48 * 2]  # 48 columns are one group, 80 are two
    assert load(directory, quantization="int8").num_linear_bytes == sum(counts) + 4 * sum(scales)
