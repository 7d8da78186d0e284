"""Choosing the next token of each row on a GPU: the formula of kernels/sampling.py, without a sort and without the host.

    d   = max x - x                                      float32; x after the bit mask and the penalties; a NaN is never chosen
    t   = min(d * (log2 e / temperature), 62)            float64: products only, so nothing can be fused
    w   = floor(2^40 * 2^-t) for every token             int64: 2^f, 0 < f <= 1, is a polynomial in whole numbers

then top-k, top-p, min-p and the choice as in kernels/sampling.py. Its weights are the same but for a factor (there they add up to
2^40, here the heaviest is 2^40) and for the rounding of a float32 softmax: w is within 2^-27 of the true exponential, and every
operation is exact or IEEE's, hence the same on any GPU, in the interpreter and in torch (`weights_of`, the reference). So the
token is always that of kernels/sampling.py's `draw` and `draw_filtered` over these weights. It may differ from its `sample`'s
only where a change of u, top_p or min_p by SLACK of itself, or of the order of weights equal within SLACK, would change it.

Weights never fall when logits rise: all coefficients are positive, and 2^1 is exact.

A place in the falling order is a weight and what lies above it. It is found by three digits of twelve bits of the weight as a
floating-point number (six of the exponent), by sums in bins (radix select; Alabi et al., Fast k-selection on GPUs, 2012).
The first digit's bins serve top-k, top-p and the choice. Reads: the logits twice (maximum; weights); the weights, int64 in
scratch memory, once more for a row without a filter, and up to 2 for each of top-k, top-p, the choice, for one with filters.
A greedy row takes the first of the greatest logits; a row that is not greedy and has no finite greatest one, the last token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import sampling
from kernels.triton_runtime import Variant, jit, runs_on, tl

LOG2_E = 1.4426950408889634
SLACK = 2.0**-18  # of float32 softmax: a few 2^-24 in a logit's difference, times up to 28 of exponent, and its sum
COEFFICIENTS = (1073741824, 744261118, 257941178, 59597949, 10323238, 1441348, 153726, 23267)  # of 2^f, times 2^30
BINS = 4096
CHUNK = 1024  # tokens a program looks at
STATE = 8  # int64 of each row: mass, min-p mass, top-k mass, total, target, then what the search knows: prefix, mass, count above
CASES = [(3, 17), (5, 1500), (4, 5000)]  # (rows, vocab)


class Rows(NamedTuple):
    """What each row asks for; every field [rows]."""

    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor  # int64, vocab or 0: off, 1: greedy
    top_p: Tensor  # float64, 1: off
    min_p: Tensor  # float64, 0: off
    seed: Tensor  # int64
    counter: Tensor  # int64


class Penalties(NamedTuple):
    """All but the tokens [rows]. A token id outside the vocabulary is ignored."""

    tokens: Tensor  # [slots, max_seq_len] int64
    slot: Tensor  # int64
    num_prompt: Tensor  # int64
    num_tokens: Tensor  # int64
    repetition: Tensor  # float32, 1: off
    presence: Tensor  # float32, 0: off
    frequency: Tensor  # float32, 0: off


def allowed_of(mask: Tensor, vocab: int) -> Tensor:
    """mask int32 [rows, words] -> bool [rows, vocab]."""
    token = torch.arange(vocab, device=mask.device)
    return ((mask[:, token // 32] >> (token % 32)) & 1) > 0


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits float32 [rows, vocab], temperature [rows] -> int64 [rows, vocab], the greatest 2^40; 0 without a finite maximum."""
    most = logits.amax(1, keepdim=True)
    t = (most - logits).double() * (LOG2_E / temperature.double())[:, None]
    fixed = (t.nan_to_num(62.0).clamp(0, 62) * 2.0**32).long()
    f = 2**32 - (fixed & (2**32 - 1))
    p = torch.full_like(f, COEFFICIENTS[-1])
    for c in COEFFICIENTS[-2::-1]:
        p = c + ((p * f) >> 32)
    return torch.where((logits > -torch.inf) & most.isfinite(), (p << 9) >> (fixed >> 32), 0)


def changed(logits: Tensor, penalties: Penalties | None = None, mask: Tensor | None = None) -> Tensor:
    """The logits that the choice is made from, float32; a NaN becomes -inf."""
    x = logits.float().clone()
    if penalties is not None:
        tokens, slot, *rest = penalties
        x = sampling.penalize(x, tokens[slot].clamp(0, x.shape[1] - 1), *rest)
    x = torch.where(x == x, x, -torch.inf)
    return x if mask is None else torch.where(allowed_of(mask, x.shape[1]), x, -torch.inf)


def reference(logits: Tensor, rows: Rows, penalties: Penalties | None = None, mask: Tensor | None = None) -> Tensor:
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


def choose_tokens(logits: Tensor, rows: Rows, penalties: Penalties | None = None, mask: Tensor | None = None) -> Tensor:
    """logits [rows, vocab] float32 or bfloat16, mask int32 [rows, ceil(vocab / 32)], bit 0: forbidden -> ids int64 [rows]."""
    if not runs_on(logits):
        return reference(logits, rows, penalties, mask)
    logits = logits.contiguous()
    device = logits.device
    count, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    out = torch.empty(count, dtype=torch.int64, device=device)
    seen = None
    if penalties is not None:
        length = penalties.tokens.shape[1]
        seen = torch.zeros(count, vocab, dtype=torch.int32, device=device)
        _count_kernel[(count, -(-length // CHUNK))](
            penalties.tokens, penalties.slot, penalties.num_prompt, penalties.num_tokens, seen, length, vocab, BLOCK=CHUNK
        )  # fmt: skip
    factors = (None, None, None) if penalties is None else tuple(penalties[4:])
    maxima = torch.empty(count, chunks, dtype=torch.float32, device=device)
    weights = torch.empty(count, vocab, dtype=torch.int64, device=device)
    bins = torch.zeros(7, count, 2, BINS, dtype=torch.int64, device=device)  # the first digit's, two of each search
    state = torch.zeros(count, STATE, dtype=torch.int64, device=device)
    u = sampling.uniform(rows.seed, rows.counter)
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocab)
    source = (logits, mask, seen, *factors)
    asked = (rows.temperature, top_k, rows.top_p, rows.min_p)
    _maxima_kernel[(count, chunks)](*source, maxima, vocab, BLOCK=CHUNK)
    _weights_kernel[(count, chunks)](*source, maxima, *asked, weights, bins[0], state, vocab, chunks, BLOCK=CHUNK,
                                     CHUNKS=max(2, 1 << (chunks - 1).bit_length()), COEFFICIENTS=COEFFICIENTS)  # fmt: skip
    for search in range(3):
        for digit in range(3):
            where = bins[2 * search + digit if digit else 0]
            step = {"SEARCH": search, "DIGIT": digit}
            if digit:
                _bins_kernel[(count, chunks)](weights, *asked, state, where, vocab, **step, BLOCK=CHUNK)
            _search_kernel[(count,)](*asked, u, where, state, vocab, **step, BINS=BINS, num_warps=8)
    _pick_kernel[(count,)](weights, *asked, state, out, vocab, BLOCK=4 * CHUNK, BLOCKS=-(-chunks // 4), num_warps=8)
    return out


@jit
def _count_kernel(
    tokens,  # [slots, length] int64
    slots, num_prompt, num_tokens,  # [rows] int64
    seen,  # [rows, vocab] int32: 2^30 for a token that is there, and its number in the output
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
def _logits_of(logits, mask, seen, repetition, presence, frequency, row, token, vocab):
    """float32, -inf beyond the vocabulary. Arguments as of _maxima_kernel."""
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, inside, other=-float("inf")).to(tl.float32)
    if seen is not None:
        marks = tl.load(seen + row * vocab + token, inside, other=0)
        count = marks & ((1 << 30) - 1)
        r = tl.load(repetition + row).to(tl.float64)  # float64, then float32: as in float32, and nothing is fused
        wide = x.to(tl.float64)
        x = tl.where(marks > 0, tl.where(x > 0, (wide / r).to(tl.float32), (wide * r).to(tl.float32)), x)
        x -= (tl.load(frequency + row).to(tl.float64) * count.to(tl.float64)).to(tl.float32)
        x -= tl.where(count > 0, tl.load(presence + row), 0.0)
    if mask is not None:
        word = tl.load(mask + row * ((vocab + 31) // 32) + token // 32, inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) > 0, x, -float("inf"))
    return tl.where((x == x) & inside, x, -float("inf"))


@jit
def _is_greedy(temperature, top_k, row):
    return (tl.load(temperature + row) == 0) | (tl.load(top_k + row) == 1)


@jit
def _is_filtered(temperature, top_k, top_p, min_p, row, vocab):
    filters = (tl.load(top_k + row) < vocab) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
    return filters & (_is_greedy(temperature, top_k, row) == 0)


@jit
def _key_of(weight):
    """36 bits that rise with the weight: six of the exponent, thirty behind the leading one. The weight is more than 0."""
    return (weight.to(tl.float64).to(tl.int64, bitcast=True) - (1023 << 52)) >> 22


@jit
def _maxima_kernel(
    logits,  # [rows, vocab]
    mask,  # [rows, ceil(vocab / 32)] int32, or None
    seen,  # [rows, vocab] int32, or None; with it the next three, [rows] float32
    repetition, presence, frequency,
    maxima,  # [rows, chunks] float32
    vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _logits_of(logits, mask, seen, repetition, presence, frequency, row, token, vocab)
    tl.store(maxima + row * tl.num_programs(1) + tl.program_id(1), tl.max(x, 0))


@jit
def _weights_kernel(
    logits, mask, seen, repetition, presence, frequency, maxima,  # as of _maxima_kernel
    temperature,  # [rows] float32
    top_k,  # [rows] int64
    top_p, min_p,  # [rows] float64
    weights,  # [rows, vocab] int64; of a greedy row 1 for the greatest
    bins,  # [rows, 2, 4096] int64: mass, count; of rows with filters
    state,  # [rows, 8] int64
    vocab, chunks,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,  # a power of two, at least chunks and 2
    COEFFICIENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    most = tl.max(tl.load(maxima + row * chunks + chunk, chunk < chunks, other=-float("inf")), 0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _logits_of(logits, mask, seen, repetition, presence, frequency, row, token, vocab)
    greedy = _is_greedy(temperature, top_k, row)
    heat = tl.where(greedy, 1.0, tl.load(temperature + row)).to(tl.float64)
    t = (most - x).to(tl.float64) * (1.4426950408889634 / heat)
    fixed = (tl.where(t < 62.0, t, 62.0) * 4294967296.0).to(tl.int64)  # without a finite maximum: inf or NaN, hence 62
    f = 4294967296 - (fixed & 4294967295)
    p = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(8):
        p = COEFFICIENTS[7 - i] + ((p * f) >> 32)
    w = (p << 9) >> (fixed >> 32)
    w = tl.where(greedy, (x == most).to(tl.int64), w)
    inside = token < vocab
    tl.store(weights + row * vocab + token, w, inside)
    w = tl.where(inside, w, 0)
    least = tl.load(min_p + row) * 1099511627776.0
    tl.atomic_add(state + row * 8, tl.sum(w, 0))
    tl.atomic_add(state + row * 8 + 1, tl.sum(tl.where(w.to(tl.float64) >= least, w, 0), 0))
    if _is_filtered(temperature, top_k, top_p, min_p, row, vocab):
        counted = w > 0
        at = bins + row * 8192 + (_key_of(tl.where(counted, w, 1)) >> 24)
        tl.atomic_add(at, w, counted)
        tl.atomic_add(at + 4096, tl.full([BLOCK], 1, tl.int64), counted)


@jit
def _needs(SEARCH: tl.constexpr, temperature, top_k, top_p, min_p, row, vocab):
    """Whether the row takes part in a search: 0 of top-k, 1 of top-p, 2 of the choice."""
    needed = _is_filtered(temperature, top_k, top_p, min_p, row, vocab)
    if SEARCH == 0:
        needed &= tl.load(top_k + row) < vocab
    if SEARCH == 1:
        needed &= tl.load(top_p + row) < 1
    return needed


@jit
def _bins_kernel(
    weights, temperature, top_k, top_p, min_p, state, bins, vocab, SEARCH: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums of the weights whose higher digits are the prefix. Arguments as of _weights_kernel."""
    row = tl.program_id(0).to(tl.int64)
    if _needs(SEARCH, temperature, top_k, top_p, min_p, row, vocab):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(weights + row * vocab + token, token < vocab, other=0)
        key = _key_of(tl.where(w > 0, w, 1))
        counted = (w > 0) & ((key >> (36 - 12 * DIGIT)) == tl.load(state + row * 8 + 5))
        at = bins + row * 8192 + ((key >> (24 - 12 * DIGIT)) & 4095)
        tl.atomic_add(at, w, counted)
        tl.atomic_add(at + 4096, tl.full([BLOCK], 1, tl.int64), counted)


@jit
def _search_kernel(
    temperature, top_k, top_p, min_p, u, bins, state, vocab, SEARCH: tl.constexpr, DIGIT: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """One more digit of the weight at which the prefix of the falling order is enough, at last what it was for. u: float64."""
    row = tl.program_id(0).to(tl.int64)
    at = state + row * 8
    mass = tl.load(at)
    top_mass = mass
    if SEARCH > 0:
        top_mass = tl.load(at + 2)
    limit = tl.maximum(tl.load(top_p + row) * top_mass.to(tl.float64), 1.0)
    wanted = tl.load(top_k + row)
    needed = _needs(SEARCH, temperature, top_k, top_p, min_p, row, vocab)
    total = top_mass
    target = mass * 0
    if SEARCH == 2:
        total = tl.minimum(tl.load(at + 3), top_mass)
        total = tl.where(tl.load(min_p + row) > 0, tl.minimum(total, tl.load(at + 1)), total)
        total = tl.maximum(total, tl.minimum(mass, 1099511627776))
        total = tl.where(_is_filtered(temperature, top_k, top_p, min_p, row, vocab), total, mass)
        target = (tl.load(u + row) * total.to(tl.float64)).to(tl.int64)
        target = tl.maximum(tl.minimum(target, total - 1), 0)
        target = tl.where(_is_greedy(temperature, top_k, row), 0, target)
    if needed:
        prefix, above, above_count = mass * 0, mass * 0, mass * 0
        if DIGIT > 0:
            prefix, above, above_count = tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
        i = tl.arange(0, BINS)
        part = tl.load(bins + row * 2 * BINS + BINS - 1 - i)
        part_count = tl.load(bins + row * 2 * BINS + 2 * BINS - 1 - i)
        running = above + tl.cumsum(part, 0)
        if SEARCH == 0:
            short = above_count + tl.cumsum(part_count, 0) < wanted
        elif SEARCH == 1:
            short = running.to(tl.float64) < limit
        else:
            short = running <= target
        found = tl.sum(short.to(tl.int32), 0)  # all bins: the whole row is not enough
        above += tl.sum(tl.where(i < found, part, 0), 0)
        above_count += tl.sum(tl.where(i < found, part_count, 0), 0)
        prefix = prefix * BINS + tl.maximum(BINS - 1 - found, 0)
        tl.store(at + 5, prefix)
        tl.store(at + 6, above)
        tl.store(at + 7, above_count)
        if DIGIT == 2:
            weight = ((prefix << 22) + (1023 << 52)).to(tl.float64, bitcast=True).to(tl.int64)
            if SEARCH == 0:
                reached = tl.minimum(above + (wanted - above_count) * weight, mass)
                tl.store(at + 2, tl.where(wanted > above_count, reached, above))
            elif SEARCH == 1:
                equals = tl.maximum(((limit - above.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64) - 1, 1)
                more = tl.arange(0, 4)
                lacking = (above + (equals + more) * weight).to(tl.float64) < limit
                tl.store(at + 3, above + (equals + tl.sum(lacking.to(tl.int64), 0)) * weight)
            else:  # which of the equal ones
                tl.store(at + 4, (target - above) // tl.maximum(weight, 1))
    else:
        if DIGIT == 2:
            if SEARCH == 2:
                tl.store(at + 4, target)
            else:
                tl.store(at + 2 + SEARCH, top_mass)


@jit
def _pick_kernel(
    weights, temperature, top_k, top_p, min_p, state, out, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The first token whose running sum, of its weight or of what equals the weight that was found, exceeds the target."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(state + row * 8 + 4)
    prefix = tl.load(state + row * 8 + 5)
    filtered = _is_filtered(temperature, top_k, top_p, min_p, row, vocab)
    running = target * 0
    chosen = target * 0
    for block in range(BLOCKS):
        token = block * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(weights + row * vocab + token, token < vocab, other=0)
        equal = (w > 0) & (_key_of(tl.where(w > 0, w, 1)) == prefix)
        w = tl.where(filtered, equal.to(tl.int64), w)
        chosen += tl.sum((running + tl.cumsum(w, 0) <= target).to(tl.int64), 0)
        running += tl.sum(w, 0)
    tl.store(out + row, tl.minimum(chosen, vocab - 1))


def variants() -> dict[str, Variant]:
    asked = {"temperature": "*fp32", "top_k": "*i64", "top_p": "*fp64", "min_p": "*fp64"}
    factors = ("repetition", "presence", "frequency")
    common = asked | {"weights": "*i64", "bins": "*i64", "state": "*i64", "u": "*fp64", "out": "*i64", "vocab": "i32"}
    made = {}
    for kind in ("fp32", "bf16"):
        types = {"logits": f"*{kind}", "mask": "*i32", "seen": "*i32", "maxima": "*fp32"} | {"chunks": "i32"} | common
        types |= dict.fromkeys(factors, "*fp32")
        constants = {"BLOCK": CHUNK, "CHUNKS": 128, "COEFFICIENTS": COEFFICIENTS}
        made[f"weights-{kind}"] = _variant(_weights_kernel, types, constants)
        made[f"maxima-{kind}"] = _variant(_maxima_kernel, types, {"BLOCK": CHUNK})
    for search in (0, 1, 2):
        made[f"search-{search}"] = _variant(_search_kernel, common, {"SEARCH": search, "DIGIT": 2, "BINS": BINS}, 8)
    made["bins"] = _variant(_bins_kernel, common, {"SEARCH": 0, "DIGIT": 1, "BLOCK": CHUNK})
    made["pick"] = _variant(_pick_kernel, common, {"BLOCK": 4 * CHUNK, "BLOCKS": 32}, num_warps=8)
    types = dict.fromkeys(("tokens", "slots", "num_prompt", "num_tokens"), "*i64")
    types |= {"seen": "*i32", "length": "i32", "vocab": "i32"}
    made["count"] = _variant(_count_kernel, types, {"BLOCK": CHUNK})
    return made


def _variant(kernel: object, types: dict[str, str], constants: dict[str, object], num_warps: int = 4) -> Variant:
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    return Variant(kernel, types, constants, num_warps, divisible=("vocab",))
