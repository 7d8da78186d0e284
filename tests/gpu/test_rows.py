"""What works on rows, and what chooses tokens, on the GPU against the references."""

from __future__ import annotations

import torch

from kernels import activation, choose_tokens, embedding, log_probs, norm
from kernels.int8_rows import Int8Rows, group_sums
from tests.gpu.harness import (
    DEVICE,
    HALVES,
    assert_near,
    each,
    ints,
    pytestmark,  # noqa: F401
    random,
)

EPS = 1e-3
# top-k, top-p, min-p
FILTERS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.02), (40, 0.8, 0.01), (3, 0.05, 0.9), (0, 0.0, 0.0)]
LOGITS = (torch.float32, torch.bfloat16)


def assert_rows(measured: Int8Rows, expected: Int8Rows) -> None:
    assert_near(measured.scale, expected.scale)
    assert torch.equal(measured.sums, group_sums(measured.q))
    difference = (measured.q.int() - expected.q.int()).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() < 0.01  # a tie may fall either way


@each("dtype", HALVES)
@each("shape", norm.CASES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(*shape, dtype=dtype),
        random(*shape, dtype=dtype, seed=1),
        random(shape[-1], dtype=dtype),
    )
    assert_near(norm.norm(x, weight, EPS), norm.reference(x.float(), weight.float(), EPS))
    normed, total = norm.add_norm(x, residual, weight, EPS)
    assert_near(total, x.float() + residual.float())
    assert_near(normed, norm.reference(total.float(), weight.float(), EPS))
    if x.ndim == 2:
        assert_rows(norm.norm_int8(x, weight, EPS), norm.reference_int8(x, weight, EPS))
        rows, total = norm.add_norm_int8(x, residual, weight, EPS)
        assert_rows(rows, norm.reference_int8(total, weight, EPS))


@each("dtype", HALVES)
@each("kind", [(False, True), (True, False), (True, True)])
def test_layer_norm_and_biases(kind: tuple[bool, bool], dtype: torch.dtype) -> None:
    centred, has_bias = kind
    x, residual = random(33, 256, dtype=dtype) + 2, random(33, 256, dtype=dtype, seed=1)
    weight, bias = random(256), random(256, seed=2) if has_bias else None
    given = weight, EPS, bias, centred
    assert_near(norm.norm(x, *given), norm.reference(x.float(), *given))
    normed, total = norm.add_norm(x, residual, *given, 0.3)
    assert_near(total, 0.3 * x.float() + residual.float())
    assert_near(normed, norm.reference(total.float(), *given))
    assert_rows(norm.norm_int8(total, *given), norm.reference_int8(total, *given))


@each("dtype", HALVES)
@each("shape", activation.CASES)
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    assert_near(activation.activate(x), activation.reference(x.float()))
    if x.ndim == 2:
        assert_rows(activation.activate_int8(x), activation.reference_int8(x))


@each("dtype", HALVES)
@each("gated", [True, False])
@each("kind", activation.KINDS)
def test_activations(kind: str, gated: bool, dtype: torch.dtype) -> None:
    x = 3 * random(7, 96, dtype=dtype)
    assert_near(activation.activate(x, kind, gated), activation.reference(x.float(), kind, gated))
    assert_rows(activation.activate_int8(x, kind, gated), activation.reference_int8(x, kind, gated))


@each("dtype", HALVES)
@each("case", embedding.CASES)
def test_embedding(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, vocab, hidden = case
    table = random(vocab, hidden, dtype=dtype)
    ids = ints([(3 * token) % (vocab + 2) for token in range(tokens)], torch.int64)
    assert torch.equal(embedding.embedding(table, ids, first=1), embedding.reference(table, ids, first=1))
    assert_near(embedding.embedding(table, ids, 8.0), embedding.reference(table, ids, 8.0))


@each("dtype", (torch.float32, *HALVES))
@each("case", log_probs.CASES)
def test_log_probs(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, vocab, n = case
    logits, ids = random(rows, vocab, dtype=dtype) * 3, ints([row % vocab for row in range(rows)], torch.int64)
    measured, expected = log_probs.log_probs(logits, ids, n), log_probs.reference(logits, ids, n)
    assert torch.equal(measured.top_ids, expected.top_ids)
    assert (measured.chosen - expected.chosen).abs().max() <= 1e-4
    assert not n or (measured.top - expected.top).abs().max() <= 1e-4


def asked(
    rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 0.8
) -> choose_tokens.SamplingRows:
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=generator).to(DEVICE)
    doubles = [torch.full((rows,), value, dtype=torch.float64, device=DEVICE) for value in (top_p, min_p)]
    heat = torch.full((rows,), temperature, device=DEVICE)
    return choose_tokens.SamplingRows(heat, torch.full((rows,), top_k, device=DEVICE), *doubles, *seeds)


@each("dtype", LOGITS)
@each("shape", [*choose_tokens.CASES, (2, 128256)])
@each("top_k, top_p, min_p", FILTERS)
def test_the_token_is_the_references(
    top_k: int, top_p: float, min_p: float, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    logits, rows = (3 * random(*shape)).to(dtype), asked(shape[0], top_k, top_p, min_p)
    assert torch.equal(choose_tokens.choose_tokens(logits, rows), choose_tokens.reference(logits, rows))
    greedy = asked(shape[0], temperature=0.0)
    assert torch.equal(choose_tokens.choose_tokens(logits, greedy), logits.float().argmax(1))


@each("dtype", LOGITS)
@each("shape", choose_tokens.CASES)
def test_the_token_behind_penalties_and_a_mask_is_the_references(shape: tuple[int, int], dtype: torch.dtype) -> None:
    count, vocab = shape
    generator = torch.Generator().manual_seed(vocab)
    tokens = torch.randint(0, min(vocab, 700), (count + 2, 1100), generator=generator)
    known = torch.randint(1, 1101, (count,), generator=generator)
    prompt = (known * torch.rand(count, generator=generator)).long()
    factors = [torch.rand(count, generator=generator) + low for low in (0.8, -0.5, -0.2)]
    slots = torch.randperm(count + 2, generator=generator)[:count]
    penalties = choose_tokens.Penalties(*(part.to(DEVICE) for part in (tokens, slots, prompt, known, *factors)))
    mask = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=generator).to(DEVICE, torch.int32)
    logits, rows = (3 * random(*shape)).to(dtype), asked(count, 20, 0.9)
    measured = choose_tokens.choose_tokens(logits, rows, penalties, mask)
    assert torch.equal(measured, choose_tokens.reference(logits, rows, penalties, mask))
