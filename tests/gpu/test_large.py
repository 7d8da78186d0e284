"""Realistic shapes, and offsets that 32 bits do not hold."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Random
from benchmarks.gpu.cases import all_cases
from kernels import context_attention, decode_attention, kv_append, log_probs
from kernels.common.kv_format import KV_FORMATS, KVPool, QuantizedPool, plain_pool
from tests.gpu.harness import (
    DEVICE,
    HALVES,
    IS_GPU,
    assert_near,
    each,
    ints,
    make_pool,
    pytestmark,  # noqa: F401
    random,
)

# Of each kernel its shapes in Llama-3-8B; of the products those of the largest layer.
CASES = [case for case in all_cases(not IS_GPU) if case.number not in (8, 9, 10) or "gate_up" in case.name]
# Elements from one block to the next: the third begins behind 2^31.
FAR = 1_100_000_000 if IS_GPU else 110_000


@each("dtype", HALVES)
@each("case", CASES)
def test_the_shapes_of_a_model(case: Case, dtype: torch.dtype) -> None:
    """The benchmark's rows: each kernel against its reference, before it is timed there."""
    inputs = case.make(Random(DEVICE, 0, dtype))
    check = case.check(inputs, case.run(inputs))
    if IS_GPU:
        torch.cuda.empty_cache()
    assert check.passed, f"error {check.error:.1e}, limit {check.limit:.1e}"


def spread(pool: KVPool, block_size: int, kv_heads: int, head_dim: int) -> KVPool:
    """The same three blocks, FAR elements from one to the next."""
    if pool.params is None:
        shape = (3, block_size, 2, kv_heads, head_dim)
        far = torch.empty(2 * FAR + math.prod(shape[1:]), dtype=pool.keys.dtype, device=DEVICE)
        made = plain_pool(far.as_strided(shape, (FAR, *torch.empty(shape[1:]).stride())))
    else:
        layout = QuantizedPool(block_size, kv_heads, head_dim, pool.format)
        far = torch.empty(2 * FAR + layout.block_bytes, dtype=torch.uint8, device=DEVICE)
        made = layout.view(far.as_strided((3, layout.block_bytes), (FAR, 1)))
    for to, of in zip(contents(made), contents(pool), strict=True):
        to.copy_(of)
    return made


def contents(pool: KVPool) -> list[Tensor]:
    return [part for part in (pool.keys, pool.values, pool.params) if part is not None]


@each("kv", KV_FORMATS)
def test_blocks_far_behind_two_billion_elements_are_read(kv: str) -> None:
    near = make_pool(3, 64, 2, 128, kv, torch.bfloat16)
    far = spread(near, 64, 2, 128)
    lengths, tables = ints([64, 130]), ints([[2, 1, 0], [0, 2, 1]])
    q = random(2, 8, 128, dtype=torch.bfloat16)
    decode = [decode_attention.decode_attention(q, pool, lengths, tables, 0.1) for pool in (near, far)]
    assert torch.equal(*decode) and decode[0].any()
    q, starts = random(50, 8, 128, dtype=torch.bfloat16), ints([0, 20, 50])
    context = [context_attention.context_attention(q, pool, starts, lengths, tables, 0.1) for pool in (near, far)]
    assert torch.equal(*context) and context[0].any()


@each("kv", KV_FORMATS)
def test_blocks_far_behind_two_billion_elements_are_written(kv: str) -> None:
    near = make_pool(3, 64, 2, 128, kv, torch.bfloat16)
    far = spread(near, 64, 2, 128)
    qkv, angles = random(5, 12 * 128, dtype=torch.bfloat16), random(64, 64)
    cells, positions = ints([130, 5, 191, 70, 128], torch.int64), torch.arange(5, device=DEVICE)
    before = [part.clone() for part in contents(near)]
    for pool in (near, far):
        kv_append.kv_append(qkv, positions, angles.cos(), angles.sin(), cells, pool)
    for one, other, old in zip(contents(near), contents(far), before):
        assert torch.equal(one, other) and not torch.equal(one, old)


def test_rows_of_logits_far_behind_two_billion_elements_are_read() -> None:
    logits = random(3, 5000)
    far = torch.empty(2 * FAR + 5000, device=DEVICE).as_strided((3, 5000), (FAR, 1))
    far.copy_(logits)
    ids = ints([1, 2, 3], torch.int64)
    near_found, far_found = (log_probs.log_probs(x, ids, 5) for x in (logits, far))
    assert torch.equal(near_found.top_ids, far_found.top_ids)
    assert_near(far_found.chosen, near_found.chosen)
