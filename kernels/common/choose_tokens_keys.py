"""Device functions of the kernels in choose_tokens.py: logits, weights, random numbers, and the search among listed keys.

A key is weight * 2^22 + 2^22 - 1 - token, int64. Keys are all different, and in falling order they are in the order of choice.
"""

from __future__ import annotations

from kernels.common.triton_runtime import jit, tl


@jit
def logits_of(source, row, token, vocab):
    """Logits after penalties and mask, float32, -inf beyond the vocabulary. `source` holds each kernel's first six arguments."""
    logits, mask, seen, repetition, presence, frequency = source
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, inside, other=-float("inf")).to(tl.float32)
    if seen is not None:
        marks = tl.load(seen + row * vocab + token, inside, other=0)
        count = marks & ((1 << 30) - 1)
        r = tl.load(repetition + row).to(
            tl.float64
        )  # float64, then rounded: equals float32 arithmetic, and nothing is fused
        wide = x.to(tl.float64)
        x = tl.where(marks > 0, tl.where(x > 0, (wide / r).to(tl.float32), (wide * r).to(tl.float32)), x)
        x -= (tl.load(frequency + row).to(tl.float64) * count.to(tl.float64)).to(tl.float32)
        x -= tl.where(count > 0, tl.load(presence + row), 0.0)
    if mask is not None:
        word = tl.load(mask + row * ((vocab + 31) // 32) + token // 32, inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) > 0, x, -float("inf"))
    return tl.where((x == x) & inside, x, -float("inf"))


@jit
def factor_of(temperature, row):
    return 1.4426950408889634 / tl.load(temperature + row).to(tl.float64)


@jit
def weight_of(d, factor, COEFFICIENTS: tl.constexpr):
    """Returns the weight int64 of d float32; choose_tokens.py defines d."""
    w, n = weight_and_exponent_of(d, factor, COEFFICIENTS)
    return w


@jit
def weight_and_exponent_of(d, factor, COEFFICIENTS: tl.constexpr):
    """Returns the weight int64 of d float32, and n int32."""
    t = d.to(tl.float64) * factor
    t = tl.where(t < 62.0, t, 62.0) * 4294967296.0  # without a finite maximum d is inf or NaN, hence 62
    words = (4503874505277440.0 - t).to(tl.int64, bitcast=True)
    g = (words & 4294967295).to(tl.uint32)
    n = 64 - ((words >> 32).to(tl.int32) & 127)
    p = g * 0 + COEFFICIENTS[7]
    for i in tl.static_range(1, 8):
        p = tl.umulhi(p, g) + COEFFICIENTS[7 - i]
    return (p.to(tl.int64) << 10) >> n.to(tl.int64), n


@jit
def target_of(seed, counter, total):
    """floor(u * total), less than total, with u as in kernels/sampling.py. `seed` and `counter` are pointers."""
    word = _mix(_mix(tl.load(seed) - 7046029254386353131) + (tl.load(counter) + 1) * -7046029254386353131)
    u = (((word >> 12) & 4503599627370495).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return tl.maximum(tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1), 0)


@jit
def _mix(z):
    z = (z ^ ((z >> 30) & 17179869183)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 137438953471)) * -7723592293110705685
    return z ^ ((z >> 31) & 8589934591)


@jit
def kth_weight(d, k, factor, COEFFICIENTS: tl.constexpr):
    """A lower bound of the k-th greatest weight: that of the k-th smallest d with its lower 16 bits set; 0 if there is none."""
    upper = d.to(tl.int32, bitcast=True) >> 16
    found = tl.sum(upper, 0) * 0
    for i in range(15):
        tried = found + (16384 >> i)
        fewer = tl.sum((upper < tried).to(tl.int32), 0) < k
        found = tl.where(fewer, tried, found)
    return weight_of(((found << 16) + 65535).to(tl.float32, bitcast=True), factor, COEFFICIENTS)


@jit
def nucleus_floor(tallies, mass, limit, splits, SPLITS: tl.constexpr):
    """A power of two such that the tokens of at least this weight hold `limit` of the mass. A weight of n is >= 2^(40 - n)."""
    split, n = tl.arange(0, SPLITS)[:, None], tl.arange(0, 64)
    tally = tl.sum(tl.load(tallies + split * 64 + n[None, :], split < splits, other=0), 0).to(tl.int64)
    max_masses = tl.where(n <= 40, tally * ((tl.full([64], 1, tl.int64) << tl.maximum(41 - n, 0).to(tl.int64)) - 1), 0)
    below = tl.sum(max_masses, 0) - tl.cumsum(max_masses, 0)
    m = tl.sum((below > mass - tl.ceil(limit).to(tl.int64)).to(tl.int32), 0)
    return (mass * 0 + 1) << tl.maximum(40 - m, 0).to(tl.int64)


@jit
def list_keys(source, greatest, maximum, factor, least, listed, keys, row, vocab,
              GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, COEFFICIENTS: tl.constexpr):  # fmt: skip
    """Lists the keys whose weight is at least `least` >= 1; returns their number and mass. `greatest`: the groups' maxima."""
    there = (weight_of(maximum - greatest, factor, COEFFICIENTS) >= least).to(tl.int32)
    tl.store(listed + tl.cumsum(there, 0) - 1, tl.arange(0, GROUPS), there > 0)
    tl.debug_barrier()
    count = tl.sum(there, 0)
    start = count * 0
    n = count * 0
    total = least * 0
    while start < count:
        i = start + tl.arange(0, TILE // GROUP)
        group = tl.load(listed + i, i < count, other=GROUPS)  # GROUPS lies beyond the vocabulary
        token = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [TILE])
        w = weight_of(maximum - logits_of(source, row, token, vocab), factor, COEFFICIENTS)
        heavy = (w >= least).to(tl.int32)
        tl.store(keys + n + tl.cumsum(heavy, 0) - 1, (w << 22) + (4194303 - token), heavy > 0)
        n += tl.sum(heavy, 0)
        total += tl.sum(tl.where(heavy > 0, w, 0), 0)
        start += TILE // GROUP
    tl.debug_barrier()
    return n, total


@jit
def floor_of(min_p):
    """The least weight that min-p keeps, at most just above the greatest weight. `min_p` is a pointer."""
    return tl.minimum(tl.ceil(tl.load(min_p) * 1099511627776.0), 1099511627777.0).to(tl.int64)


@jit
def choose_key(keys, n, total, least, mass, k, top_p, min_p, seed, counter, TILE: tl.constexpr):
    """The token of a row. Its n keys include all that the filters may keep, and have the mass `total`.

    `mass` is that of all weights, or 0 with a top-k. top_p, min_p, seed and counter are pointers to the row's values.
    """
    low = (least << 22) - 1
    count = n
    if k < n:
        low, count, total = _prefix(keys, n, low, count, total, k, 0, TILE)
    p = tl.load(top_p)
    if p < 1:
        limit = tl.maximum(p * tl.where(mass > 0, mass, total).to(tl.float64), 1.0)
        low, count, total = _prefix(keys, n, low, count, total, limit, 1, TILE)
    floor = (floor_of(min_p) << 22) - 1
    if floor > low:
        low = floor
        count, total, smallest, others = _above(keys, n, low, TILE)
    total = tl.maximum(total, 1099511627776)  # the greatest weight is always left
    target = target_of(seed, counter, total)
    if count == 0:
        low = low * 0 + (1 << 62) - 1
        count, total, smallest, others = _above(keys, n, low, TILE)
    low, count, total = _prefix(keys, n, low, count, total, target, 2, TILE)
    count, total, key, others = _above(keys, n, low, TILE)
    return 4194303 - (key & 4194303)


@jit
def _prefix(keys, n, low, count, mass, bound, SEARCH: tl.constexpr, TILE: tl.constexpr):
    """Finds the smallest key above which there are fewer keys than bound (SEARCH 0), mass < bound (1), or mass <= bound (2).

    Returns a number just below that key, how many keys are above the number, and their mass. `low`, `count` and `mass` are such
    numbers to begin with: either the smallest key above `low` has too much above it, or it is the result.
    """
    high = low * 0 + 4611686018431582207  # the greatest possible key
    high_count = count * 0
    while count - high_count > 1:
        bits = low.to(tl.float64).to(tl.int64, bitcast=True)
        bits += (
            high.to(tl.float64).to(tl.int64, bitcast=True) - bits
        ) >> 1  # the bits of a float near the geometric mean
        middle = tl.where(high >> 1 > low, bits.to(tl.float64, bitcast=True).to(tl.int64), low + ((high - low) >> 1))
        above, above_mass, next_key, last_key = _above(keys, n, middle, TILE)
        if SEARCH == 0:
            within = above < bound
        elif SEARCH == 1:
            within = above_mass.to(tl.float64) < bound
        else:
            within = above_mass <= bound
        high = tl.where(within, last_key, high)
        high_count = tl.where(within, above, high_count)
        low = tl.where(within, low, next_key - 1)
        count = tl.where(within, count, above)
        mass = tl.where(within, mass, above_mass)
    return low, count, mass


@jit
def _above(keys, n, low, TILE: tl.constexpr):
    """The number of keys above `low`, their mass, the smallest of them, and the greatest of the other keys."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    smallest = tl.full([TILE], 9223372036854775807, tl.int64)
    greatest = tl.zeros([TILE], tl.int64)
    start = n * 0
    while start < n:
        i = start + tl.arange(0, TILE)
        key = tl.load(keys + i, i < n, other=0)
        is_above = key > low
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, key >> 22, 0)
        smallest = tl.where(is_above, tl.minimum(smallest, key), smallest)
        greatest = tl.where(is_above, greatest, tl.maximum(greatest, key))
        start += TILE
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(smallest, 0), tl.max(greatest, 0)
