"""GGUF files of every family: the logits of the checkpoints that they were made of, and transformers'.

The writer, backend/convert/gguf, knows nothing of the reader. llama.cpp's own converter (llama-cpp-python 0.3.36) made a file of
each architecture as well, with an empty vocabulary, and Granite without scaled positions: the logits were those of the
checkpoints, to 2e-6 for Granite and bit for bit for all others, and transformers' log-probabilities within 4e-5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from backend.api import ConfigError
from backend.api.checkpoint.gguf import TYPES, read_header
from backend.architectures.checkpoint import examine
from backend.architectures.gguf.families import GGUF_FAMILIES
from backend.convert.gguf.families import RULES
from backend.convert.run import ConvertSettings, convert_checkpoint
from backend.layers.linear import DenseLinear, Weight, make_torch_linear
from backend.models.gguf import read_config
from backend.models.linears import LinearOptions
from backend.models.loader import load_directory
from benchmarks.quality.perplexity import row_logits
from kernels.common.super_blocks import SuperBlocks, floats
from tests.families.tiny import FAMILIES, YARN, make
from tests.model.gguf_files import write_gguf

ROWS = torch.randint(1, 131, (2, 40), generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
PLAIN_ROPE = dict(rope_type="default", rope_theta=500.0)
DEFAULT_WINDOWS = dict(layer_types=None, num_hidden_layers=7)
# What llama.cpp's files cannot say is as they take it to be.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama gelu yarn": dict(hidden_act="silu"),
    "mistral": dict(sliding_window=None),
    "ministral 3": {},
    "qwen2": dict(use_sliding_window=False),
    "qwen3": {},
    "gemma": {},
    "gemma 2": dict(query_pre_attn_scalar=16),
    "gemma 3": dict(attention_bias=False, query_pre_attn_scalar=16, **DEFAULT_WINDOWS),
    "phi-3": dict(original_max_position_embeddings=512),
    "phi-4-mini short": {},
    "phi-4-mini long": {},
    "glm": dict(head_dim=8),
    "glm 4": {},
    "granite": {},
    "granite 4": {},
    "smollm3": dict(use_sliding_window=False, sliding_window=None, no_rope_layers=None, **DEFAULT_WINDOWS),
    "olmo 2": {},
    "olmo 3": {},
    "exaone 4": {},
    "command r": {},
    "command r7b": DEFAULT_WINDOWS,
    "starcoder 2": dict(sliding_window=None),
    "stablelm": {},
    "stablelm parallel": {},
    "gpt-neox": {},
    "gpt-neox in sequence": dict(hidden_act="gelu"),
    "seed-oss": {},
    "ernie 4.5": {},
    "qwen2 moe": dict(mlp_only_layers=[]),
    "qwen3 moe": {},
    "mixtral": {},
    "olmoe": {},
    "granite moe": {},
    "granite moe shared": {},
    "glm 4.5": {},
    "dots 1": {},
    "ernie 4.5 moe": {},
    "minimax m2": {},
    "gpt-oss": {},
}

# test_gguf_hybrids.py has these.
LATENT = {"deepseek2"}  # test_gguf_latent.py has it
HYBRIDS = {"qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "granitehybrid"}


def logits(path: Path) -> Tensor:
    return row_logits(load_directory(path, None, "float32", CPU), ROWS).log_softmax(-1)


def test_every_architecture_has_a_case() -> None:
    made = {gguf.MODEL_ARCH_NAMES[RULES[FAMILIES[name][1]]] for name in CASES}
    assert made | HYBRIDS | LATENT == set(GGUF_FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_logits_of_the_checkpoint_that_it_was_made_of(tmp_path: Path, name: str) -> None:
    directory = make(tmp_path / "checkpoint", name, **CASES[name])
    measured = logits(write_gguf(directory, tmp_path / "model.gguf"))
    # Granite's factors of frequencies are rounded to float32 in the file.
    torch.testing.assert_close(measured, logits(directory), rtol=0, atol=1e-5)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        torch.testing.assert_close(measured, model(ROWS).logits.log_softmax(-1), rtol=0, atol=1e-4)


BY_ARCHITECTURE = {  # its first case
    gguf.MODEL_ARCH_NAMES[RULES[FAMILIES[name][1]]]: name for name in reversed(CASES)
}
WHOLE_BLOCKS = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=64)
# The same of experts, whose sizes have several names.
SIZES_OF_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
HELD = LinearOptions(make=lambda weight, bias: make_torch_linear(_floats_of(weight), bias), holds_super_blocks=True)


def _floats_of(weight: Weight) -> Weight:
    return floats(weight) if isinstance(weight, SuperBlocks) else weight


def dequantised(file: Path, into: Path) -> Path:
    """The same file with the float32 values of llama.cpp's own package."""
    reader = gguf.GGUFReader(file)
    writer = copy_of(reader, into)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
    return written(writer, into)


@pytest.mark.parametrize("kind", [kind.name for kind in TYPES.values() if kind.name != "F32"])
@pytest.mark.parametrize("architecture", sorted(set(GGUF_FAMILIES) - HYBRIDS - LATENT))
def test_every_type_is_read_in_every_architecture(tmp_path: Path, architecture: str, kind: str) -> None:
    """Blocks that stay as they are, and those that become floats, have the logits of the values that gguf reads."""
    name = BY_ARCHITECTURE[architecture]
    own = FAMILIES[name][2]
    sizes = WHOLE_BLOCKS | {key: 256 for key in SIZES_OF_EXPERTS if key in own}
    if "num_experts_per_tok" in own:
        sizes["intermediate_size"] = 256
    directory = make(tmp_path / "checkpoint", name, **CASES[name] | sizes)
    file = write_gguf(directory, tmp_path / "model.gguf", kind=kind)
    assert kind in {place.type.name for place in read_header(file).tensors.values()}
    expected = logits(dequantised(file, tmp_path / "floats.gguf"))
    torch.testing.assert_close(logits(file), expected, rtol=0, atol=1e-4)
    held = load_directory(file, None, "float32", CPU, HELD)
    if isinstance(held.embedding, DenseLinear):  # torch embeds tokens from a table alone
        held.embedding = held.embedding.weight
    torch.testing.assert_close(row_logits(held, ROWS).log_softmax(-1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["glm", "glm 4", "qwen2"])
def test_queries_keys_and_values_may_be_one_tensor(tmp_path: Path, name: str) -> None:
    directory = make(tmp_path / "checkpoint", name, **CASES[name])
    plain = write_gguf(directory, tmp_path / "plain.gguf")
    fused = write_gguf(directory, tmp_path / "fused.gguf", fuses_qkv=True)
    names = [set(read_header(file).tensors) for file in (plain, fused)]
    assert "blk.0.attn_qkv.weight" in names[1] - names[0]
    assert torch.equal(logits(fused), logits(plain))


def changed(tmp_path: Path, name: str, key: str, value: object, **overrides: Any) -> Path:
    """A file of a family with one setting more, or another one."""
    directory = make(tmp_path / "checkpoint", name, **CASES[name] | overrides)
    file = write_gguf(directory, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(file)
    writer = copy_of(reader, tmp_path / "changed.gguf", without=key)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    add[type(value)](key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    return written(writer, tmp_path / "changed.gguf")


def copy_of(reader: gguf.GGUFReader, file: Path, without: str = "") -> gguf.GGUFWriter:
    """A writer that has the settings of a file."""
    writer = gguf.GGUFWriter(file, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.")) and field.name != without:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    return writer


def written(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_one_number_for_each_layer_is_read_where_they_are_alike(tmp_path: Path) -> None:
    """As in files of Granite 4."""
    key = "granite.attention.head_count_kv"
    file = changed(tmp_path, "granite", key, [2, 2, 2])
    assert read_config(read_header(file)).num_kv_heads == examine(file).num_kv_heads == 2
    with pytest.raises(
        ConfigError, match=r"granite.attention.head_count_kv is \[2, 1, 2\], and differs between layers"
    ):
        read_config(read_header(changed(tmp_path / "other", "granite", key, [2, 1, 2])))


@pytest.mark.parametrize(
    "name, key, value, message",
    [
        ("qwen2", "qwen2.attention.sliding_window", 24, "attention.sliding_window is 24, which is not supported"),
        (
            "qwen2",
            "qwen2.rope.dimension_sections",
            [2, 1, 1, 0],
            "rope.dimension_sections is .* models that read images",
        ),
        ("granite", "granite.rope.scaling.finetuned", False, "a model without rotation, which is not supported"),
        ("exaone 4", "exaone4.attention.sliding_window_pattern", [True], r"sliding_window_pattern is .* for 3 layers"),
        ("glm 4", "glm4.nextn_predict_layers", 1, "nextn_predict_layers is 1, which is not supported"),
        ("phi-3", "phi3.rope.dimension_count", 7, "rope.dimension_count is 7, an even number up to 8 is needed"),
    ],
)
def test_what_a_file_cannot_be_served_with_is_named(
    tmp_path: Path, name: str, key: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(read_header(changed(tmp_path, name, key, value)))


def test_a_factor_of_yarn_s_own_is_multiplied_with_that_of_its_length(tmp_path: Path) -> None:
    """llama.cpp's rope_attn_factor, which mscale and its quotient are not."""
    file = changed(tmp_path, "llama gelu yarn", "llama.rope.scaling.attn_factor", 0.5)
    plain = read_config(read_header(write_gguf(tmp_path / "checkpoint", tmp_path / "plain.gguf"))).ropes[0]
    assert read_config(read_header(file)).ropes[0].attention_factor == pytest.approx(plain.attention_factor / 2)
    assert plain.factor == YARN["factor"]


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_a_checkpoint_that_transformers_reads(tmp_path: Path, name: str) -> None:
    """Names, fused projections, the order of rows and the norms are the family's again."""
    directory = make(tmp_path / "checkpoint", name, **CASES[name])
    file = write_gguf(directory, tmp_path / "model.gguf", fuses_qkv=name == "glm")
    done = convert_checkpoint(file, tmp_path / "back", ConvertSettings())
    has_factors = name == "granite"  # llama3's scaling of 64 positions is no published one
    assert bool(done.remarks) == has_factors
    assert torch.equal(logits(tmp_path / "back"), logits(file))
    if not has_factors:
        model, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.inference_mode():
            measured = model(ROWS).logits.log_softmax(-1)
        torch.testing.assert_close(measured, logits(file), rtol=0, atol=1e-4)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_published_scalings_of_llama_3_have_their_name_again(tmp_path: Path, factor: float) -> None:
    rope = dict(
        rope_type="llama3",
        rope_theta=500_000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    directory = make(tmp_path / "checkpoint", "llama", head_dim=64, rope_parameters=rope)
    done = convert_checkpoint(write_gguf(directory, tmp_path / "model.gguf"), tmp_path / "back", ConvertSettings())
    assert done.remarks == []
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"] == rope


def test_a_file_is_examined_as_it_is_loaded(tmp_path: Path) -> None:
    """Before a server starts: sizes, and the family that its settings make it one of."""
    directory = make(tmp_path / "checkpoint", "olmo 3", **CASES["olmo 3"])
    file = write_gguf(directory, tmp_path / "model.gguf")
    found, loaded = examine(file), read_config(read_header(file))
    assert (found.architecture, found.num_layers, found.head_dim, found.max_position) == (
        "Olmo3ForCausalLM",
        loaded.num_layers,
        loaded.head_dim,
        loaded.max_position,
    )
