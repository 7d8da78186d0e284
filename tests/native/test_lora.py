"""LoRA in the native kernels: a row has the same bits in any batch, beside any adapters, in every variant."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.common.adapter import LINEARS, Part
from kernels.common.kv_format import PLAIN
from kernels.cpu.decoder import NativeDecoder, NativeForm, NativeLayer, NativeNorm, NativeShape
from kernels.cpu.linear import PackedLinear
from kernels.cpu.lora import PackedAdapter, pack_a, pack_b
from kernels.cpu.memory import Arena

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 40, 72, 3, 1, 20, 50
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
OUTPUTS = {"qkv": (0, Q, Q + KV, Q + 2 * KV), "out": (0, HIDDEN), "gate_up": (0, INTER, 2 * INTER), "down": (0, HIDDEN)}
INPUTS = {"qkv": HIDDEN, "out": Q, "gate_up": HIDDEN, "down": INTER}
NUM_LAYERS, BLOCK = 2, 32
KINDS = ["sequential", "parallel", "out norms"]  # of blocks
SHAPE = NativeShape(HEADS, KV_HEADS, HEAD_DIM, INTER, BLOCK, kv_format=PLAIN, max_seq_len=256)


def test_packing_puts_each_number_where_the_kernel_looks_for_it() -> None:
    """b [3, 2] from column 31 on lies in two panels: its first row at the end of the first one."""
    packed = pack_b(torch.tensor([[1.0, 2], [3, 4], [5, 6]]), 31)
    assert packed.shape == (2, 2, 32)
    assert packed[0, :, 31].tolist() == [1, 2] and packed[1, :, :2].tolist() == [[3, 5], [4, 6]]
    assert packed.count_nonzero() == 6
    assert pack_a(torch.ones(2, 65)).shape == (2, 128)


def make_linear(library: CDLL, arena: Arena, n: int, k: int, dtype: torch.dtype) -> tuple[PackedLinear, Tensor]:
    weight = (torch.randn(n, k) / k**0.5).to(dtype)
    return PackedLinear.of_floats(library, arena, weight, None), weight


class Model:
    """Two layers with random weights, and the same model in torch."""

    def __init__(self, library: CDLL, dtype: torch.dtype, kind: str = "sequential") -> None:
        torch.manual_seed(0)
        arena, self.dtype = Arena(), dtype
        self.embedding = torch.randn(VOCAB, HIDDEN).to(dtype)
        angles = torch.randn(256, HEAD_DIM // 2)
        layers, self.weights = [], []
        for _ in range(NUM_LAYERS):
            made = {name: make_linear(library, arena, OUTPUTS[name][-1], INPUTS[name], dtype) for name in LINEARS}
            self.weights.append({name: weight for name, (_, weight) in made.items()})
            packed = {name: linear for name, (linear, _) in made.items()}
            ones, rotary = NativeNorm(torch.ones(HIDDEN)), (angles.cos(), angles.sin())
            norms = dict(attention_norm=ones, mlp_norm=ones)
            if kind == "out norms":
                norms |= dict(attention_out_norm=ones, mlp_out_norm=ones)
            layers.append(NativeLayer(**packed, **norms, rotary=rotary))
        head, _ = make_linear(library, arena, VOCAB, HIDDEN, dtype)
        form = NativeForm(1e-5, is_parallel=kind == "parallel")
        self.decoder = NativeDecoder(library, SHAPE, form, self.embedding, layers, ones, head)
        blocks = 16
        size = self.decoder.kv_block_bytes // dtype.itemsize
        self.pools = [torch.zeros(blocks, size, dtype=dtype) for _ in range(NUM_LAYERS)]
        self.tables = np.arange(blocks, dtype=np.int32).reshape(8, 2)
        self.token_ids = torch.arange(8 * 256).reshape(8, 256) % VOCAB

    def run(self, rows: Sequence[tuple[int, int]], adapters: Sequence[PackedAdapter | None]) -> dict[int, Tensor]:
        """Prompts of (slot, tokens) as one batch. Returns each slot's logits [tokens, vocab]."""
        numbers = np.array([(slot, 0, tokens, tokens) for slot, tokens in rows], dtype=np.int32)
        _, logits = self.decoder.step(numbers, self.token_ids, self.tables, self.pools, True, adapters)
        assert logits is not None
        parts = logits.split([tokens for _, tokens in rows])
        return {slot: part for (slot, _), part in zip(rows, parts, strict=True)}


def make_layers(
    seed: int, rank: int, dtype: torch.dtype, names: Sequence[str] = LINEARS
) -> list[dict[str, list[Part]]]:
    torch.manual_seed(seed)

    def part(name: str, start: int, stop: int) -> Part:
        a = torch.randn(rank, INPUTS[name]) / INPUTS[name] ** 0.5
        return Part(start, a.to(dtype), (torch.randn(stop - start, rank) / rank**0.5).to(dtype), 0.5 + seed / 7)

    return [
        {name: [part(name, *ends) for ends in zip(OUTPUTS[name], OUTPUTS[name][1:])] for name in names}
        for _ in range(NUM_LAYERS)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch_beside_any_adapters(
    kernels: CDLL, dtype: torch.dtype, tokens: int, kind: str
) -> None:
    """Eight rows of 30 tokens are more than 64, from which on gate and up go another way."""
    model = Model(kernels, dtype, kind)
    made = [PackedAdapter(make_layers(seed, rank, dtype), dtype) for seed, rank in ((1, 4), (2, 7), (3, 16), (4, 1))]
    made.append(PackedAdapter(make_layers(5, 3, dtype, ("qkv", "down")), dtype))
    assigned = [made[0], None, made[1], made[2], None, made[3], made[4], made[0]]
    alone = {}
    for slot, adapter in enumerate(assigned):
        alone |= model.run([(slot, tokens)], [adapter])
    together = model.run([(slot, tokens) for slot in range(8)], assigned)
    order = [5, 0, 7, 2, 1, 6]
    shuffled = model.run([(slot, tokens) for slot in order], [assigned[slot] for slot in order])
    for slot in range(8):
        assert torch.equal(together[slot], alone[slot])
        assert slot not in shuffled or torch.equal(shuffled[slot], alone[slot])
    plain = model.run([(slot, tokens) for slot in range(8)], ())
    assert [torch.equal(plain[slot], alone[slot]) for slot in range(8)] == [each is None for each in assigned]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_does_what_merged_weights_do(kernels: CDLL, kind: str) -> None:
    """In float32: W + scale * B A, up to the order of sums."""
    dtype = torch.float32
    layers = make_layers(1, 6, dtype)
    adapted = Model(kernels, dtype, kind).run([(3, 20)], [PackedAdapter(layers, dtype)])[3]
    merged = Model(kernels, dtype, kind)
    arena = Arena()
    form, embedding, native, norm, head, _ = merged.decoder._held
    for layer, weights, parts in zip(native, merged.weights, layers, strict=True):
        for name in LINEARS:
            for part in parts[name]:
                weights[name][part.first : part.first + len(part.b)] += part.scale * part.b @ part.a
            setattr(layer, name, PackedLinear.of_floats(kernels, arena, weights[name], None))
    merged.decoder = NativeDecoder(kernels, SHAPE, form, embedding, native, norm, head)
    torch.testing.assert_close(adapted, merged.run([(3, 20)], ())[3], rtol=2e-4, atol=2e-4)
