"""Chooses the next token of each row: penalties, temperature, top-k, top-p, min-p, one random number per row.

Formula, for one row with logits x [vocab], in this order:

    penalties     x_t <- x_t / r  if x_t > 0  else  x_t * r      for t in prompt + output (CTRL, Keskar et al. 2019)
                  x_t <- x_t - frequency * count(t) - presence * [count(t) > 0]     counts over the output only
    weights       w_t  = floor(2^40 * softmax((x - max x) / temperature)_t)         an integer, so that sums are exact
    top-k         keeps the k largest w, equal ones in token order
    top-p         of these in falling order, keeps a token while less than p of their mass lies before it (Holtzman et al. 2019)
    min-p         of these, keeps those with w_t >= min_p * max w                   (Nguyen et al. 2024)
    choice        the first token whose running sum of w exceeds floor(u * total), u in (0, 1)

The running sum follows token order for a row without top-k, top-p, min-p, and falling weight for a row with one of
them: this depends on the row's own parameters only. Integer sums do not depend on the order of addition, and softmax
reduces each row by itself, so a row's choice is the same, bit for bit, in any batch. A token of weight 0 (masked,
filtered, or less likely than 2^-40) is never chosen, because its running sum equals that of the token before it.

u is made from (seed, counter) by the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014), applied to the seed and again to the sum with the counter times the golden gamma.

The functions use torch operators on any device. On a CPU the native kernel (cpu/sampling.py) does all of this in one call; on a
GPU choose_tokens.py makes the same choice from weights of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_BITS = 40  # a weight needs 41 bits (softmax may be 1), its token id the other 22 of a positive int64
MAX_VOCAB = 1 << (63 - WEIGHT_BITS - 1)
MAX_TOPK = 1024  # up to this k torch.topk is faster than a full sort
HEAD = 512  # on a CPU, tokens that are ranked first: most top-p sets lie within them, and trying costs little

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # the constants are written as signed 64-bit numbers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


# ------------------------------------------------------------------------------------------------------- random numbers


def mix64(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words; z int64 of any shape, arithmetic modulo 2^64."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """One number in the open interval (0, 1) per row, float64; both int64 (a uint64 as two's complement)."""
    word = mix64(mix64(seed + _GOLDEN_GAMMA) + (counter + 1) * _GOLDEN_GAMMA)
    return (_shift_right(word, 12).double() + 0.5) * 2.0**-52  # 52 random bits plus a half: exact, never 0, never 1


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# --------------------------------------------------------------------------------------------------------------- logits


def penalize(
    logits: Tensor,  # [rows, vocab] float32
    token_ids: Tensor,  # [rows, length] int64; tokens beyond num_tokens are ignored
    num_prompt: Tensor,  # [rows] int64
    num_tokens: Tensor,  # [rows] int64, at least 1
    repetition: Tensor,  # [rows] float32, 1 = off
    presence: Tensor,  # [rows] float32, 0 = off
    frequency: Tensor,  # [rows] float32, 0 = off
) -> Tensor:
    """Return the penalised logits; `logits` may be overwritten."""
    position = torch.arange(token_ids.shape[1], device=logits.device)
    known = position < num_tokens[:, None]  # [rows, length]
    seen = torch.where(known, token_ids, token_ids[:, :1])  # the tail repeats the first token
    value = logits.gather(1, seen)
    repetition = repetition[:, None]
    logits = logits.scatter_(1, seen, torch.where(value > 0, value / repetition, value * repetition))
    output = known & (position >= num_prompt[:, None])
    count = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_add_(1, seen, output.int())
    return logits - frequency[:, None] * count - presence[:, None] * (count > 0)


def tail_matches(tokens: Tensor, num_tokens: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    """True if a next token can complete each word, bool [words]: the known tokens end with all of it but its last token.

    tokens [words, max_len] int64 are the tokens of each word's row, num_tokens [words] how many are known, words
    [words, width] int64 the words aligned to the right, lengths [words].

        known tokens   ... a b c | ?      word   . . b c d      width 5, length 3: b c must equal, d is the candidate
    """
    width = words.shape[1]
    offset = torch.arange(width - 1, device=words.device) - (width - 1)  # [width - 1], -1 is the newest token
    position = num_tokens[:, None] + offset
    tail = tokens.gather(1, position.clamp(0, tokens.shape[1] - 1))
    needed = offset >= 1 - lengths[:, None]
    return (~needed | ((tail == words[:, :-1]) & (position >= 0))).all(dim=1)


def repeated(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Every token that ends a run of `size` among tokens [length], and whether the run begins with the newest size - 1 tokens.

    Both [length - size + 1], int64 and bool: a next token that is marked would repeat a run.
    """
    grams = tokens.unfold(0, size, 1)
    newest = tokens[len(tokens) - size + 1 :]
    return grams[:, -1], (grams[:, :-1] == newest).all(dim=1)


def decayed_top_p(output: Tensor, top_p: float, decay: float, least: float, reset_id: int) -> Tensor:
    """top_p of the next token as a float64 scalar, after output tokens [length] int64.

    Each output token multiplies it by `decay`, and it falls to `least`; the token `reset_id` sets it back (Factual nucleus
    sampling, Lee et al. 2022). It stays below 1, so the row has a filter at all times, and its running sum one order.
    """
    places = torch.arange(1, len(output) + 1, device=output.device) * (output == reset_id)
    since = len(output) - (places.amax() if len(output) else torch.zeros((), device=output.device))
    decayed = (top_p * decay ** since.double()).clamp(min=least)
    return torch.where(since == 0, top_p, decayed).clamp(max=1 - 2.0**-53)


# --------------------------------------------------------------------------------------------------------------- choice


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """Integer weights [rows, vocab] int64 that add up to about 2^40; a row without any finite logit gets weights of 0.

    logits float32, temperature [rows] float32 > 0. The maximum is subtracted first, so no temperature overflows.
    """
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    return (torch.softmax(scaled, dim=-1).nan_to_num_(nan=0.0) * 2.0**WEIGHT_BITS).long()


def rank(order: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row in falling order, equal ones in token order: (values, token ids), both [rows, k] int64.

    `order` [rows, vocab] holds integers in 0 .. 2^40. The token id is put into the low bits, so one sort of different
    integers gives both, and does not depend on how torch orders equal ones.
    """
    last = order.shape[1] - 1
    bits = last.bit_length()
    keys = (order << bits) | torch.arange(last, -1, -1, device=order.device)
    keys = keys.topk(k, dim=-1).values if k <= MAX_TOPK else keys.sort(dim=-1, descending=True).values[:, :k]
    return keys >> bits, last - (keys & ((1 << bits) - 1))


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Token ids [rows]: inverse of the running sum in token order; weights [rows, vocab] int64, u [rows] float64."""
    running = weights.cumsum(dim=-1)
    return _first_above(running, running[:, -1:], u).clamp_(max=weights.shape[1] - 1)


def draw_filtered(weights: Tensor, u: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, k_max: int) -> Tensor:
    """Like `draw` over the tokens that the three filters keep, in falling order of weight.

    top_k [rows] int64 in 1 .. vocab, top_p and min_p [rows] float64; `k_max` is the greatest top_k (known on the host).
    The most likely token is always kept. On a CPU, rows whose top-p set lies within their HEAD are not fully sorted; on
    other devices finding that out would cost a synchronisation. The choice is the same either way.
    """
    mass = weights.sum(dim=-1)
    if k_max <= MAX_TOPK or weights.device.type != "cpu":
        return _draw_ranked(*rank(weights, k_max), mass, u, top_k, top_p, min_p)
    ranked, ids = rank(weights, HEAD)
    chosen = _draw_ranked(ranked, ids, mass, u, top_k, top_p, min_p)
    ends = (ranked.sum(dim=-1) >= top_p * mass) | (ranked[:, -1] < min_p * ranked[:, 0])  # within the head
    rest = (~(ends & (top_k == weights.shape[1])) & (top_k > HEAD)).nonzero().squeeze(1)
    if len(rest):
        ranked, ids = rank(weights[rest], k_max)
        chosen[rest] = _draw_ranked(ranked, ids, mass[rest], u[rest], top_k[rest], top_p[rest], min_p[rest])
    return chosen


def _draw_ranked(
    ranked: Tensor, ids: Tensor, mass: Tensor, u: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Draw from weights in falling order [rows, k]. Either k >= top_k, or `mass` is the sum of the top_k weights."""
    k = ranked.shape[1]
    ranked = ranked.masked_fill(torch.arange(k, device=ids.device) >= top_k[:, None], 0)
    running = ranked.cumsum(dim=-1)
    mass = torch.where(top_k <= k, running[:, -1], mass)
    keep = (running - ranked) < (top_p * mass)[:, None]  # both conditions hold for the first tokens, up to some place
    keep &= ranked >= min_p[:, None] * ranked[:, :1]
    last = (keep.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    return ids.gather(1, _first_above(running, running.gather(1, last), u).clamp_(max=k - 1)[:, None]).squeeze(1)


def _first_above(running: Tensor, total: Tensor, u: Tensor) -> Tensor:
    """Index [rows] of the first running sum > floor(u * total); rounding must not lift the target to the total."""
    target = torch.minimum((u[:, None] * total).long(), total - 1).clamp_(min=0)
    return torch.searchsorted(running, target, right=True).squeeze(1)


def sample(
    logits: Tensor,  # [rows, vocab] float32, after masks and penalties
    temperature: Tensor,  # [rows] float32
    u: Tensor,  # [rows] float64
    filters: tuple[Tensor, Tensor, Tensor] | None = None,  # top_k int64, top_p float64, min_p float64, each [rows]
    k_max: int = 0,  # greatest top_k of `filters`
) -> Tensor:
    """Token ids [rows] int64."""
    weights = weights_of(logits, temperature)
    if filters is None:
        return draw(weights, u)
    return draw_filtered(weights, u, *filters, k_max=k_max)


# ------------------------------------------------------------------------------------------------------------ log-probs


def top_log_probs(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row, equal ones in token order: (log-probabilities, token ids), both [rows, k].

    log_probs [rows, vocab] float32, none positive: without the sign, the bits of such floats fall as the number rises.
    """
    order = 0x7FFFFFFF - (log_probs.contiguous().view(torch.int32) & 0x7FFFFFFF)
    ids = rank(order.long(), k)[1]
    return log_probs.gather(1, ids), ids


# (rows, vocab, top_k, top_p, min_p, temperature): what tests and benchmarks run; 0, 1 and 0 switch a filter off.
CASES: tuple[tuple[int, int, int, float, float, float], ...] = (
    (1, 17, 0, 1.0, 0.0, 1.0),
    (3, 4096, 0, 1.0, 0.0, 0.7),
    (8, 4096, 50, 1.0, 0.0, 1.0),
    (8, 4096, 0, 0.9, 0.0, 1.0),
    (64, 4096, 40, 0.95, 0.05, 0.8),
    (4, 128256, 0, 0.9, 0.1, 1.0),
    (4, 128256, 1000, 1.0, 0.0, 1.3),
)
