"""GGUF files: whole models, and the values of each type of tensor, against llama.cpp's own package and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from backend.api.checkpoint.gguf import TYPES, read_header
from backend.layers.linear import DenseLinear, Weight, in_eight_bits, make_torch_linear
from backend.models import gguf_blocks
from backend.models.gguf import GgufTensors, read_config
from backend.models.linears import LinearOptions
from backend.models.loader import load_directory, open_directory
from benchmarks.quality.perplexity import row_logits
from kernels.common.quantize import dequantize
from kernels.common.super_blocks import SuperBlocks, floats
from tests.model.conftest import Oracle
from tests.model.gguf_files import as_checkpoint, random_blocks, write_gguf
from tools.make_random_model import make_random_model

ROWS = torch.randint(131, (2, 40), generator=torch.Generator().manual_seed(0))
BLOCK_TYPES = [kind.name for kind in TYPES.values() if kind.size > 1]
CPU = torch.device("cpu")


def logits(directory: Path, dtype: str = "float32", **options: Any) -> Tensor:
    model = load_directory(directory, None, dtype, CPU, LinearOptions(**options))
    if isinstance(model.embedding, DenseLinear):  # of Forms: torch embeds tokens from a table alone
        model.embedding = model.embedding.weight
    return row_logits(model, ROWS)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers whose rows are whole blocks of 256."""
    directory = tmp_path_factory.mktemp("whole_blocks")
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    return make_random_model(directory, "llama", seed=3, **sizes)


def test_a_float32_file_has_the_logits_of_the_checkpoint_it_was_made_of(
    family: tuple[Path, Oracle], tmp_path: Path
) -> None:
    """Every family, with biases, tied embeddings, windows and both kinds of rope scaling; the oracle is transformers'."""
    directory, oracle = family
    if "window_from_second_layer" in directory.name:
        pytest.skip("llama.cpp's files of Qwen2 have no windows")
    measured = logits(write_gguf(directory, tmp_path / "model.gguf"))
    torch.testing.assert_close(measured, logits(directory), rtol=0, atol=1e-5)
    for row, expected in zip(ROWS, measured):
        torch.testing.assert_close(expected, oracle.logits(row.tolist()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_have_the_values_of_llama_cpp_s_own_package_bit_for_bit(kind: str) -> None:
    raw = random_blocks((7, 768), Type[kind])
    expected = gguf.quants.dequantize(raw, Type[kind])
    measured = gguf_blocks.floats(torch.from_numpy(raw), kind).numpy()
    assert np.array_equal(measured.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_what_stays_in_integers_loses_nothing(kind: str) -> None:
    raw = random_blocks((7, 96), Type[kind])
    expected = torch.from_numpy(gguf.quants.dequantize(raw, Type[kind]))
    held = [gguf_blocks.int8(torch.from_numpy(raw), kind)]
    if kind == "Q4_0":
        held.append(in_eight_bits(gguf_blocks.four_bits(torch.from_numpy(raw))))
    for weight in held:
        assert torch.equal(dequantize(weight.q, weight.scale, weight.group), expected)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F16", "BF16"])
def test_a_model_of_each_type_has_the_logits_of_its_dequantised_weights(
    model_dir: Path, tmp_path: Path, kind: str
) -> None:
    file = write_gguf(model_dir, tmp_path / "model.gguf", kind)
    expected = logits(as_checkpoint(file, model_dir, tmp_path / "floats"))
    torch.testing.assert_close(logits(file), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_quantised_file_computes_in_bfloat16_and_holds_its_floats_in_it(
    model_dir: Path, tmp_path: Path, kind: str
) -> None:
    file = write_gguf(model_dir, tmp_path / "model.gguf", kind)
    model = load_directory(file, None, "auto", CPU)
    assert model.dtype == torch.bfloat16
    floats = load_directory(as_checkpoint(file, model_dir, tmp_path / "floats"), None, "bfloat16", CPU)
    assert torch.equal(model.embedding, floats.embedding)
    if kind == "Q4_K":
        assert torch.equal(row_logits(model, ROWS), row_logits(floats, ROWS))


class Forms:
    """A MakeLinear that notes the form of each weight."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, weight: Weight, bias: Tensor | None) -> Any:
        self.seen.append(weight.kind if isinstance(weight, SuperBlocks) else type(weight).__name__)
        return make_torch_linear(floats(weight) if isinstance(weight, SuperBlocks) else weight, bias)


def _mixed(name: str) -> str:
    """As llama.cpp mixes types: q, k and v differ in the second layer, of which two can be int8; gate and up differ in both."""
    types = {"output.weight": "Q8_0", "blk.1.attn_v.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_1"}
    return types.get(name, "Q6_K" if "ffn_down" in name else "Q5_0" if name == "blk.1.attn_k.weight" else "Q4_0")


def test_a_layer_keeps_its_integers_if_all_projections_of_it_can(model_dir: Path, tmp_path: Path) -> None:
    """Order: head; then of each layer q k v, output, gate up, down. Down is Q6_K, the first gate-up has one Q4_1: floats."""
    file = write_gguf(model_dir, tmp_path / "model.gguf", _mixed)
    forms = Forms()
    measured = logits(file, make=forms)
    first = ["Weight4", "Weight4", "Tensor", "Tensor"]
    second = ["QuantizedWeight", "Weight4", "Weight4", "Tensor"]
    assert forms.seen == ["QuantizedWeight", *first, *second]
    expected = logits(as_checkpoint(file, model_dir, tmp_path / "floats"))
    torch.testing.assert_close(measured, expected, rtol=0, atol=1e-4)


def _mixed_super_blocks(name: str) -> str:
    """As in a Q4_K_M file; the second layer has a k of another kind, and gate and up differ."""
    types = {"output": "Q6_K", "attn_v": "Q6_K", "ffn_up": "Q5_K", "ffn_down": "Q6_K", "ffn_gate": "Q4_K"}
    return "Q8_0" if name == "blk.1.attn_k.weight" else types.get(name.split(".")[-2], "Q4_K")


def test_blocks_stay_as_they_are_where_linear_layers_take_them(model_dir: Path, tmp_path: Path) -> None:
    """Order: embedding, head, and of each layer q k v, output, gate up, down.

    In float32 the logits are those of the values, and on tiers without such layers all are floats.
    """
    file, forms, others = write_gguf(model_dir, tmp_path / "model.gguf", _mixed_super_blocks), Forms(), Forms()
    expected = logits(as_checkpoint(file, model_dir, tmp_path / "floats"))
    torch.testing.assert_close(logits(file, make=forms, holds_super_blocks=True), expected, rtol=0, atol=1e-4)
    assert forms.seen == ["Q4_K", "Q6_K", "k mix", "Q4_K", "k mix", "Q6_K", "mix 16", "Q4_K", "k mix", "Q6_K"]
    torch.testing.assert_close(logits(file, make=others), expected, rtol=0, atol=1e-4)
    assert set(others.seen) == {"Tensor"}


def test_biases_stay_beside_blocks(tmp_path: Path) -> None:
    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
    model = make_random_model(tmp_path / "model", "qwen2", seed=6, **sizes)
    file, forms = write_gguf(model, tmp_path / "model.gguf", "Q5_0"), Forms()
    expected = logits(as_checkpoint(file, model, tmp_path / "floats"))
    torch.testing.assert_close(logits(file, make=forms, holds_super_blocks=True), expected, rtol=0, atol=1e-4)
    assert set(forms.seen) == {"Q5_0"}


def test_a_head_that_is_the_embedding_is_held_in_its_super_blocks(tmp_path: Path) -> None:
    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
    model = make_random_model(tmp_path / "tied", "llama", seed=5, tie_word_embeddings=True, **sizes)
    file, forms = write_gguf(model, tmp_path / "model.gguf", "Q6_K"), Forms()
    expected = logits(as_checkpoint(file, model, tmp_path / "floats"))
    torch.testing.assert_close(logits(file, make=forms, holds_super_blocks=True), expected, rtol=0, atol=1e-4)
    assert forms.seen == ["Q6_K"] * 5, "one layer is the embedding and the head"


def test_a_model_says_what_its_weights_take(model_dir: Path, tmp_path: Path) -> None:
    """131 rows of 256 float32 are 134,144 bytes."""
    model = load_directory(write_gguf(model_dir, tmp_path / "model.gguf"), None, "float32", CPU)
    assert model.memory.endswith(" MB, 32.00 bits a weight; embedding 0.1 MB")


def test_on_a_gpu_only_four_bits_stay_integers(model_dir: Path, tmp_path: Path) -> None:
    """There is no GPU kernel for int8 in groups."""
    header = read_header(write_gguf(model_dir, tmp_path / "model.gguf", _mixed))
    config = read_config(header)
    tensors = GgufTensors(header, config)
    held, of_gpu = tensors.held_for(config, torch.bfloat16, torch.device("cuda"), LinearOptions())
    assert "lm_head.weight" in of_gpu and "model.layers.0.self_attn.q_proj.blocks" in of_gpu
    assert held.quantization is not None and "model.layers.1.self_attn.q_proj.weight" in of_gpu


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_rounding_while_loading_is_that_of_the_dequantised_checkpoint(
    model_dir: Path, tmp_path: Path, kind: str, quantization: str
) -> None:
    file = write_gguf(model_dir, tmp_path / "model.gguf", kind)
    floats = as_checkpoint(file, model_dir, tmp_path / "floats")
    assert torch.equal(logits(file, quantization=quantization), logits(floats, quantization=quantization))


@pytest.mark.parametrize(
    "kinds, dtype",
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q6_K", "bfloat16")],
)
def test_the_type_to_compute_in_is_that_of_the_matrices(
    model_dir: Path, tmp_path: Path, kinds: str, dtype: str
) -> None:
    checkpoint = open_directory(write_gguf(model_dir, tmp_path / "model.gguf", kinds))
    assert str(checkpoint.compute_dtype("auto")) == f"torch.{dtype}"


def test_large_matrices_are_read_in_slices_of_rows(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(model_dir, tmp_path / "model.gguf", "Q4_K")
    whole = logits(file)
    monkeypatch.setattr("kernels.common.quantize.ELEMENTS_AT_ONCE", 256 * 5)  # five rows; 131 rows leave a rest
    assert torch.equal(logits(file), whole)
