"""Chooses the next token of each row on a GPU by the formula of kernels/sampling.py, without a sort and without the host.

    d   = max x - x                                      float32; x after the bit mask and the penalties; a NaN is never chosen
    t   = min(d * (log2 e / temperature), 62)            float64
    t   = round(2^32 * t) / 2^32 = n - g                 n whole, 0 <= g < 1: the words of the float64 2^52 + 2^38 - 2^32 * t
    w   = floor(2^40 * 2^g * 2^-n) for every token       int64: 2^g is a polynomial in whole numbers of 32 bits

then top-k, top-p, min-p and the choice follow kernels/sampling.py. The weights here equal its weights up to a factor (there they
add up to 2^40, here the heaviest is 2^40) and up to the rounding of a float32 softmax: w is within 2^-27 of the true exponential.
Every operation is exact or rounded as IEEE 754 says, hence the same on any GPU, in the interpreter and in torch (`weights_of`,
the reference); where a compiler may fuse a product with a sum, the product is by a power of two and exact. So the token always
equals that of `draw` and `draw_filtered` of kernels/sampling.py over these weights. It can differ from that of `sample` there
only if changing u, top_p or min_p by a factor of 1 +- SLACK, or swapping weights that are equal within SLACK, changes the token.

Weights never fall when logits rise: all coefficients are positive, and they add up to 2 (in units of 2^30).

There are three launches, whatever the rows ask for:
1. The greatest logit of every GROUP of tokens. Greedy rows and rows with a top-k read all logits only here.
2. For rows without a filter, and for top-p without top-k: the sum of the weights of each CHUNK, and a histogram of n.
3. One program a row. A greedy row takes the first of the greatest logits. A row without a filter finds its chunk and then its
   token by running sums. A row with filters needs no token lighter than a bound `least`. It reads only groups whose greatest
   logit has at least that weight, and lists their tokens that have, as keys of (weight, token id). Keys are all different, and
   in falling order they are in the order of choice. Top-k, top-p and the choice each need the smallest key with not too much
   above it; it is found by halving an interval until it holds one key, so the order of the list does not matter.

`least` is the maximum of these bounds: 1; the k-th greatest of the groups' greatest weights, because k tokens weigh at least as
much; for top-p without top-k, a power of two below which lies at most the mass that top_p leaves out, as the histogram of n
shows; for min-p, unless a top-k and a top-p are combined, min_p of the greatest weight. FlashInfer's and vLLM's kernels without a
sort also sample from a few heavy candidates, but they guess a pivot, where here the groups' maxima bound it.
A row that is not greedy and has no finite logit gets the last token. In the worst case, flat logits with a top-p, all tokens are
listed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import sampling
from kernels.common.choose_tokens_keys import (
    choose_key,
    factor_of,
    floor_of,
    kth_weight,
    list_keys,
    logits_of,
    nucleus_floor,
    target_of,
    weight_and_exponent_of,
    weight_of,
)
from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl

LOG2_E = 1.4426950408889634
# Bound of a float32 softmax's relative error: a few 2^-24 in a difference of logits, times exponents up to 28, and the sum's.
SLACK = 2.0**-18
COEFFICIENTS = (
    1073741824,
    744261118,
    257941178,
    59597949,
    10323238,
    1441348,
    153726,
    23267,
)  # the polynomial of 2^g, times 2^30
COUNTED = 1024  # tokens of a row's text that one program counts
GROUP = 64  # tokens that share a stored maximum of logits
CHUNK = 2048  # tokens that share a stored sum of weights
MAXIMA = 4096  # tokens for which one program computes the groups' maxima
TILE = 1024  # tokens, or listed keys, that the last kernel reads at a time
PROGRAMS = 2048  # programs that the sums of weights are divided over: several for each of 132 multiprocessors
CASES = [(3, 17), (5, 1500), (4, 5000)]  # (rows, vocab)


class SamplingRows(NamedTuple):
    """The sampling parameters of each row; every field is [rows]."""

    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor  # int64, vocab or 0: off, 1: greedy
    top_p: Tensor  # float64, 1: off
    min_p: Tensor  # float64, 0: off
    seed: Tensor  # int64
    counter: Tensor  # int64


class Penalties(NamedTuple):
    """Penalties of each row; every field but `tokens` is [rows]. Token ids outside the vocabulary are ignored."""

    tokens: Tensor  # [slots, max_seq_len] int64
    slot: Tensor  # int64
    num_prompt: Tensor  # int64
    num_tokens: Tensor  # int64
    repetition: Tensor  # float32, 1: off
    presence: Tensor  # float32, 0: off
    frequency: Tensor  # float32, 0: off


def allowed_of(mask: Tensor, vocab: int) -> Tensor:
    """Unpacks mask int32 [rows, words] to bool [rows, vocab]."""
    token = torch.arange(vocab, device=mask.device)
    return ((mask[:, token // 32] >> (token % 32)) & 1) > 0


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns the weights int64 [rows, vocab], at most 2^40, of logits float32 [rows, vocab] at temperature [rows].

    The weights of a row without a finite maximum are 0.
    """
    maximum = logits.amax(1, keepdim=True)
    t = (maximum - logits).double() * (LOG2_E / temperature.double())[:, None]
    whole = (2.0**52 + 2.0**38 - t.nan_to_num(62.0).clamp(max=62) * 2.0**32).long()
    g = whole & (2**32 - 1)
    n = 64 - ((whole >> 32) & 127)
    p = torch.full_like(g, COEFFICIENTS[-1])
    for c in COEFFICIENTS[-2::-1]:
        p = c + ((p * g) >> 32)
    return torch.where((logits > -torch.inf) & maximum.isfinite(), (p << 10) >> n, 0)


def changed(logits: Tensor, penalties: Penalties | None = None, mask: Tensor | None = None) -> Tensor:
    """The logits after penalties and mask, float32; a NaN becomes -inf."""
    x = logits.float().clone()
    if penalties is not None:
        tokens, slot, *rest = penalties
        x = sampling.penalize(x, tokens[slot].clamp(0, x.shape[1] - 1), *rest)
    x = torch.where(x == x, x, -torch.inf)
    return x if mask is None else torch.where(allowed_of(mask, x.shape[1]), x, -torch.inf)


def reference(
    logits: Tensor, rows: SamplingRows, penalties: Penalties | None = None, mask: Tensor | None = None
) -> Tensor:
    """Token ids int64 [rows]."""
    x = changed(logits, penalties, mask)
    vocab = x.shape[1]
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocab).clamp(max=vocab)
    greedy = (rows.temperature == 0) | (rows.top_k == 1)
    filtered = (top_k < vocab) | (rows.top_p < 1) | (rows.min_p > 0)
    weights = weights_of(x, torch.where(greedy, 1.0, rows.temperature))
    u = sampling.uniform(rows.seed, rows.counter)
    chosen = sampling.draw(weights, u)
    drawn = sampling.draw_filtered(weights, u, top_k, rows.top_p, rows.min_p, vocab)
    chosen = torch.where(filtered & (weights.sum(1) > 0), drawn, chosen)
    return torch.where(greedy, x.argmax(1), chosen)


def choose_tokens(
    logits: Tensor, rows: SamplingRows, penalties: Penalties | None = None, mask: Tensor | None = None
) -> Tensor:
    """Chooses token ids int64 [rows] from logits [rows, vocab] float32 or bfloat16; mask int32 [rows, ceil(vocab / 32)].

    A 0 bit of the mask forbids its token. Nothing passes a mask yet: it waits for guided decoding, rows 000-42
    to 000-47 of docs/features.md. Raises ValueError for a vocabulary that is too large.
    """
    if not runs_on(logits):
        return reference(logits, rows, penalties, mask)
    logits = logits.contiguous()
    count, vocab = logits.shape
    if vocab > sampling.MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens: a key has room for ids below {sampling.MAX_VOCAB}")
    groups, chunks = -(-vocab // GROUP), -(-vocab // CHUNK)
    loops = min(next_power_of_two(-(-count * chunks // PROGRAMS)), next_power_of_two(chunks))
    splits = -(-chunks // loops)

    def scratch(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, *shape, dtype=dtype, device=logits.device)

    source = (logits, mask, _seen(penalties, count, vocab), *(penalties[4:] if penalties is not None else (None,) * 3))
    asked = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    sizes = {"GROUPS": max(2, next_power_of_two(groups)), "CHUNK": CHUNK, "COEFFICIENTS": COEFFICIENTS}
    maxima = scratch(groups, dtype=torch.float32)
    masses, tallies = scratch(chunks), scratch(splits, 64, dtype=torch.int32)
    listed, keys, out = scratch(groups, dtype=torch.int32), scratch(vocab), scratch()
    _maxima_kernel[(count, -(-vocab // MAXIMA))](*source, maxima, vocab, groups, BLOCK=MAXIMA, GROUP=GROUP)
    _masses_kernel[(count, splits)](
        *source, maxima, *asked, masses, tallies, vocab, groups, chunks, LOOPS=loops, **sizes
    )
    _choose_kernel[(count,)](
        *source, maxima, *asked, rows.seed, rows.counter, masses, tallies, listed, keys, out, vocab, groups, chunks, splits,
        CHUNKS=max(2, next_power_of_two(chunks)), SPLITS=max(2, next_power_of_two(splits)), GROUP=GROUP, TILE=TILE, **sizes,
    )  # fmt: skip
    return out


def _seen(penalties: Penalties | None, count: int, vocab: int) -> Tensor | None:
    """Returns int32 [rows, vocab]: 2^30 plus the count in the output for tokens that occur in the row, 0 for the others."""
    if penalties is None:
        return None
    length = penalties.tokens.shape[1]
    seen = torch.zeros(count, vocab, dtype=torch.int32, device=penalties.tokens.device)
    _count_kernel[(count, -(-length // COUNTED))](
        penalties.tokens, penalties.slot, penalties.num_prompt, penalties.num_tokens, seen, length, vocab, BLOCK=COUNTED
    )  # fmt: skip
    return seen


@jit
def _count_kernel(
    tokens,  # [slots, length] int64
    slots, num_prompt, num_tokens,  # [rows] int64
    seen,  # the result of _seen, filled with zeros before
    length, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = (position < tl.load(num_tokens + row)) & (position < length)
    token = tl.load(tokens + tl.load(slots + row) * length + position, known, other=-1)
    known &= (token >= 0) & (token < vocab)
    at = seen + row * vocab + tl.where(known, token, 0)
    tl.atomic_or(at, 1 << 30, known)
    tl.atomic_add(at, 1, known & (position >= tl.load(num_prompt + row)))


@jit
def _asked_of(temperature, top_k, top_p, min_p, row, vocab):
    """Returns (k, or vocab without a top-k; whether it is greedy, has filters, needs all weights' sum) of a row."""
    k = tl.load(top_k + row)
    greedy = (tl.load(temperature + row) == 0) | (k == 1)
    k = tl.where((k > 0) & (k < vocab), k, vocab)
    nucleus = tl.load(top_p + row) < 1
    filtered = ((k < vocab) | nucleus | (tl.load(min_p + row) > 0)) & (greedy == 0)
    massive = ((filtered == 0) | (nucleus & (k == vocab))) & (greedy == 0)
    return k, greedy, filtered, massive


@jit
def _maxima_kernel(
    logits,  # [rows, vocab]
    mask,  # [rows, ceil(vocab / 32)] int32, or None
    seen,  # [rows, vocab] int32, or None; with it the next three, [rows] float32
    repetition, presence, frequency,
    maxima,  # [rows, groups] float32
    vocab, groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = logits_of((logits, mask, seen, repetition, presence, frequency), row, token, vocab)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(maxima + row * groups + group, tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1), group < groups)


@jit
def _maxima_of(maxima, row, groups, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)
    return tl.load(maxima + row * groups + group, group < groups, other=-float("inf"))


@jit
def _masses_kernel(
    logits, mask, seen, repetition, presence, frequency, maxima,  # see _maxima_kernel
    temperature,  # [rows] float32
    top_k,  # [rows] int64
    top_p, min_p,  # [rows] float64
    masses,  # [rows, chunks] int64: sums of weights
    tallies,  # [rows, splits, 64] int32: histogram of n, for rows with top-p
    vocab, groups, chunks,
    GROUPS: tl.constexpr,  # a power of two, at least groups and 2
    CHUNK: tl.constexpr,
    LOOPS: tl.constexpr,  # chunks of one program
    COEFFICIENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _, _, filtered, massive = _asked_of(temperature, top_k, top_p, min_p, row, vocab)
    if massive:
        maximum = tl.max(_maxima_of(maxima, row, groups, GROUPS), 0)
        factor = factor_of(temperature, row)
        tally = tl.zeros([64], tl.int32)
        for i in range(LOOPS):
            chunk = tl.program_id(1) * LOOPS + i
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = logits_of((logits, mask, seen, repetition, presence, frequency), row, token, vocab)
            w, n = weight_and_exponent_of(maximum - x, factor, COEFFICIENTS)
            tl.store(masses + row * chunks + chunk, tl.sum(w, 0), chunk < chunks)
            if filtered:
                tally += tl.histogram(n, 64)
        if filtered:
            at = (row * tl.num_programs(1) + tl.program_id(1)) * 64 + tl.arange(0, 64)
            tl.store(tallies + at, tally)


@jit
def _choose_kernel(
    logits, mask, seen, repetition, presence, frequency, maxima, temperature, top_k, top_p, min_p,  # see _masses_kernel
    seed, counter,  # [rows] int64
    masses, tallies,  # see _masses_kernel
    listed,  # [rows, groups] int32, scratch
    keys,  # [rows, vocab] int64, scratch
    out,  # [rows] int64
    vocab, groups, chunks, splits,
    GROUPS: tl.constexpr,  # these, CHUNKS and SPLITS: powers of two, at least groups, chunks, splits and 2
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k, greedy, filtered, massive = _asked_of(temperature, top_k, top_p, min_p, row, vocab)
    source = (logits, mask, seen, repetition, presence, frequency)
    greatest = _maxima_of(maxima, row, groups, GROUPS)
    maximum = tl.max(greatest, 0)
    if greedy:
        group = tl.min(tl.where(greatest == maximum, tl.arange(0, GROUPS), GROUPS - 1), 0)
        token = group * GROUP + tl.arange(0, GROUP)
        x = logits_of(source, row, token, vocab)
        tl.store(out + row, tl.min(tl.where(x == maximum, token, vocab - 1), 0))
    else:
        factor = factor_of(temperature, row)
        mass = tl.load(seed + row) * 0
        if massive:
            mass = tl.sum(_parts_of(masses, row, chunks, CHUNKS), 0)
        if filtered:
            p = tl.load(top_p + row)
            least = mass * 0 + 1
            if k < vocab:
                least = tl.maximum(least, kth_weight(maximum - greatest, k, factor, COEFFICIENTS))
            if massive:
                limit = p * mass.to(tl.float64)
                least = tl.maximum(least, nucleus_floor(tallies + row * splits * 64, mass, limit, splits, SPLITS))
            if (k == vocab) | (p >= 1):
                least = tl.maximum(least, tl.minimum(floor_of(min_p + row), 1099511627776))
            own = keys + row * vocab
            greatest = _maxima_of(maxima, row, groups, GROUPS)  # loaded again to save registers
            n, total = list_keys(source, greatest, maximum, factor, least, listed + row * groups, own, row, vocab,
                                 GROUP, GROUPS, TILE, COEFFICIENTS)  # fmt: skip
            at = (top_p + row, min_p + row, seed + row, counter + row)
            chosen = choose_key(own, n, total, least, mass, k, *at, TILE)
            tl.store(out + row, tl.where(n > 0, chosen, vocab - 1))
        else:
            target = target_of(seed + row, counter + row, mass)
            parts = _parts_of(masses, row, chunks, CHUNKS)
            found = tl.minimum(tl.sum((tl.cumsum(parts, 0) <= target).to(tl.int32), 0), chunks - 1)
            target -= tl.sum(tl.where(tl.arange(0, CHUNKS) < found, parts, 0), 0)
            x = logits_of(source, row, found * CHUNK + tl.arange(0, CHUNK), vocab)
            w = weight_of(maximum - x, factor, COEFFICIENTS)
            before = tl.sum((tl.cumsum(w, 0) <= target).to(tl.int32), 0)
            tl.store(out + row, tl.minimum(found * CHUNK + before, vocab - 1))


@jit
def _parts_of(masses, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.load(masses + row * chunks + chunk, chunk < chunks, other=0)


def variants() -> dict[str, Variant]:
    types = {
        "mask": "*i32",
        "seen": "*i32",
        "maxima": "*fp32",
        "temperature": "*fp32",
        "top_k": "*i64",
        "top_p": "*fp64",
    }
    types |= {
        "min_p": "*fp64",
        "seed": "*i64",
        "counter": "*i64",
        "masses": "*i64",
        "tallies": "*i32",
        "listed": "*i32",
    }
    types |= {"keys": "*i64", "out": "*i64"} | dict.fromkeys(("repetition", "presence", "frequency"), "*fp32")
    types |= dict.fromkeys(("vocab", "groups", "chunks", "splits", "length"), "i32")
    types |= dict.fromkeys(("tokens", "slots", "num_prompt", "num_tokens"), "*i64")
    sizes: dict[str, object] = {
        "GROUP": GROUP,
        "GROUPS": 2048,
        "CHUNK": CHUNK,
        "CHUNKS": 64,
        "LOOPS": 8,
        "SPLITS": 8,
        "TILE": TILE,
    }
    sizes |= {"COEFFICIENTS": COEFFICIENTS}
    plain = dict.fromkeys(("mask", "seen", "repetition", "presence", "frequency"))

    def variant(kernel: Any, logits: str, given: dict[str, object]) -> Variant:
        names = kernel.arg_names
        constants = {name: value for name, value in given.items() if name in names}
        kinds = {
            name: kind for name, kind in (types | {"logits": logits}).items() if name in names and name not in given
        }
        return Variant(kernel, kinds, constants, divisible=("vocab",))

    made = {"count": variant(_count_kernel, "*bf16", {"BLOCK": COUNTED})}
    for name, logits, absent in (("bf16", "*bf16", plain), ("fp32-penalties-mask", "*fp32", {})):
        made[f"maxima-{name}"] = variant(_maxima_kernel, logits, sizes | absent | {"BLOCK": MAXIMA})
        made[f"masses-{name}"] = variant(_masses_kernel, logits, sizes | absent)
        made[f"choose-{name}"] = variant(_choose_kernel, logits, sizes | absent)
    return made
