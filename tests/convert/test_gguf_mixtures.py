"""`./everbatch convert --to gguf` of mixtures of experts: the types and the rounding of their tensors, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from backend.api.errors import ConfigError
from backend.convert.gguf.types import FILE_TYPES, type_of
from tests.convert.test_gguf import to_gguf
from tests.families.tiny import make

SIZES: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    num_local_experts=3,
    num_experts_per_tok=1,
)


def test_types_of_experts_are_llama_cpp_s() -> None:
    """Compared with its quantiser for 7 and 8 experts: routers in float32, more bits for attention beside eight experts."""

    def types(names: str, num_experts: int) -> list[str]:
        found = [
            type_of(FILE_TYPES["Q4_K_M"], f"blk.4.{name}", (64, 256), 9, True, num_experts) for name in names.split()
        ]
        return [kind.name for kind in found]

    of_attention = "attn_q.weight attn_k.weight attn_v.weight attn_output.weight"
    assert types(of_attention, 7) == ["Q4_K"] * 4
    assert types(of_attention, 8) == ["Q4_K", "Q8_0", "Q8_0", "Q5_K"]
    of_experts = (
        "ffn_gate_exps.weight ffn_gate_exps.bias ffn_gate_inp.weight ffn_gate_inp_shexp.weight exp_probs_b.bias"
    )
    assert types(of_experts, 8) == ["Q4_K", "F32", "F32", "F32", "F32"]
    layers = [
        type_of(FILE_TYPES["Q4_K_M"], f"blk.{layer}.ffn_down_exps.weight", (64, 256), 9, True) for layer in range(9)
    ]
    assert [layer for layer, kind in enumerate(layers) if kind is Type.Q6_K] == [0, 3, 6, 7, 8]


@pytest.mark.parametrize("name", ["mixtral", "granite moe", "gpt-oss"])
def test_each_expert_is_rounded_with_its_own_importance(tmp_path: Path, name: str) -> None:
    """Where tensors are of one expert, and of all."""
    own = dict(layer_types=["sliding_attention"]) if name == "gpt-oss" else {}
    source = make(tmp_path / "hf", name, **SIZES | own)
    writer = gguf.GGUFWriter(tmp_path / "imatrix", "imatrix")
    sums, counts = np.ones((3, 256), np.float32), np.array([[2], [0], [4]], np.float32)
    sums[1], sums[2, ::2] = 0, 400
    writer.add_tensor("blk.0.ffn_up_exps.weight.in_sum2", sums * counts)
    writer.add_tensor("blk.0.ffn_up_exps.weight.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ways = ("none", str(tmp_path / "imatrix"), "measured")
    files = [
        to_gguf(source, tmp_path / f"{place}.gguf", type="Q4_K_M", importance=how) for place, how in enumerate(ways)
    ]
    plain, given, measured = ({each.name: each.data for each in gguf.GGUFReader(file).tensors} for file in files)
    assert [key for key in plain if not np.array_equal(plain[key], given[key])] == ["blk.0.ffn_up_exps.weight"]
    up = "blk.0.ffn_up_exps.weight"
    changed = [np.mean(one != other) for one, other in zip(plain[up], given[up], strict=True)]
    assert changed[2] > 20 * max(changed[:2])  # where all columns count alike, a few numbers are rounded otherwise
    assert not np.array_equal(plain["blk.0.ffn_down_exps.weight"], measured["blk.0.ffn_down_exps.weight"])


def test_what_no_file_can_say_and_a_lacking_expert_are_refused(tmp_path: Path) -> None:
    normed = make(tmp_path / "normed", "qwen2 moe", mlp_only_layers=[], norm_topk_prob=True)
    with pytest.raises(
        ConfigError, match="a GGUF file cannot say that experts.is_normalised is true; it would be read"
    ):
        to_gguf(normed, tmp_path / "model.gguf")
    source = make(tmp_path / "fewer", "mixtral")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has 2 parts of blk.1.ffn_down_exps.weight, 3 are needed"):
        to_gguf(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
