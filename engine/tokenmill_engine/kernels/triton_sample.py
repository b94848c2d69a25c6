"""One token per row of logits in one launch, in Triton: the rules of `draw.py`, without a sort.

One program takes one row and passes over it several times; a row of 150,000 logits stays in a GPU's
second-level cache. As in `draw.py`, probabilities are integers, so the order of addition does not
matter, and each filter is a lower bound on the scaled logit that keeps all tokens tied with it.
The bounds of top-k and top-p are found by a search over the float32 numbers themselves, whose bit
patterns are ordered like their magnitudes: three candidates for each pass, at most 16 passes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill_engine import shares
from tokenmill_engine.packed_settings import LOG_MIN_P, POSITION, SEED, TEMPERATURE, TOP_K, TOP_P

# What a kernel reads of its module must be marked as constant.
SEED_ROW, POSITION_ROW, TOP_K_ROW = map(tl.constexpr, (SEED, POSITION, TOP_K))
TEMPERATURE_ROW, LOG_MIN_P_ROW, TOP_P_ROW = map(tl.constexpr, (TEMPERATURE, LOG_MIN_P, TOP_P))
_NO_TOKEN = tl.constexpr(-1)
_FLOOR, _MAGIC, _LOG2_E = map(tl.constexpr, (shares.FLOOR, shares.MAGIC, shares.LOG2_E))
_LN2_HIGH, _LN2_LOW = map(tl.constexpr, (shares.LN2_HIGH, shares.LN2_LOW))
_P7, _P6, _P5, _P4, _P3, _P2 = map(tl.constexpr, shares.COEFFICIENTS)
_POWER = tl.constexpr(shares.EXPONENT_BIAS + shares.SCALE_BITS << 23)
_UNIT = tl.constexpr(2.0**-52)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _scaled(row, index, vocab, peak, temperature):
    """At most 0; minus infinity beyond the vocabulary."""
    logits = tl.load(row + index, mask=index < vocab, other=float("-inf"))
    return tl.div_rn(logits - peak, temperature)


@triton.jit
def _bits(scaled):
    """An integer that is the smaller, the likelier the token; ties and only ties are equal."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _shares(scaled, kept):
    """Unnormalised probabilities as integers, zero for what the filters removed.

    The steps of `shares.py`, one rounding each; the kernel is compiled without fused ones.
    """
    z = tl.maximum(scaled, _FLOOR)
    shifted = z * _LOG2_E + _MAGIC
    n = shifted - _MAGIC
    r = z - n * _LN2_HIGH - n * _LN2_LOW
    p = r * _P7 + _P6
    p = p * r + _P5
    p = p * r + _P4
    p = p * r + _P3
    p = p * r + _P2
    p = p * (r * r) + r + 1.0
    power = (shifted.to(tl.int32, bitcast=True) << 23) + _POWER
    shares = (p * power.to(tl.float32, bitcast=True)).to(tl.int64)
    return tl.where(_bits(scaled) <= kept, shares, 0)


@triton.jit
def _total(
    row, vocab, peak, temperature, kept,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        lanes += _shares(_scaled(row, index, vocab, peak, temperature), kept)
    return tl.sum(lanes, 0)


@triton.jit
def _smallest_set(
    row, vocab, peak, temperature, kept, needed,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest bound whose tokens reach `needed` together: as a number, or by their shares."""
    # The tokens within `low` do not reach it, those within `high` do.
    low = tl.full([], -1, tl.int64)
    high = kept.to(tl.int64)
    while high - low > 1:
        step = (high - low + 3) // 4
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        in_first = tl.zeros([BLOCK], tl.int64)
        in_second = tl.zeros([BLOCK], tl.int64)
        in_third = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            index = start + tl.arange(0, BLOCK)
            scaled = _scaled(row, index, vocab, peak, temperature)
            bits = _bits(scaled)
            if COUNT:
                weights = (index < vocab).to(tl.int64)
            else:
                weights = _shares(scaled, kept)
            in_first += tl.where(bits <= first, weights, 0)
            in_second += tl.where(bits <= second, weights, 0)
            in_third += tl.where(bits <= third, weights, 0)
        by_first = tl.sum(in_first, 0) >= needed
        by_second = tl.sum(in_second, 0) >= needed
        by_third = tl.sum(in_third, 0) >= needed
        low_beyond = tl.where(by_second, first, tl.where(by_third, second, third))
        high_beyond = tl.where(by_second, second, tl.where(by_third, third, high))
        low = tl.where(by_first, low, low_beyond)
        high = tl.where(by_first, first, high_beyond)
    return high.to(tl.int32)


@triton.jit
def _uniform(seed, position):
    """The number of `noise.uniform` for choice 0, bit for bit."""
    zero = tl.zeros([], tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    first, second, _third, _fourth = tl.philox(seed, low, high, zero, zero)
    bits = (first.to(tl.int64) << 20) | (second >> 12).to(tl.int64)
    return (bits.to(tl.float64) + 0.5) * _UNIT


@triton.jit
def _invert(
    row, vocab, peak, temperature, kept, target,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token, in vocabulary order, at which the sum of the shares exceeds `target`."""
    lanes = tl.arange(0, BLOCK)
    start = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int64)
    shares = _shares(_scaled(row, lanes, vocab, peak, temperature), kept)
    mass = tl.sum(shares, 0)
    while before + mass <= target:
        before += mass
        start += BLOCK
        shares = _shares(_scaled(row, start + lanes, vocab, peak, temperature), kept)
        mass = tl.sum(shares, 0)
    reached = before + tl.cumsum(shares, 0) > target
    return tl.min(tl.where(reached, start + lanes, vocab), 0)


@triton.jit
def _draw(
    row, vocab, peak, settings, stride,
    temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    numbers = settings.to(tl.pointer_type(tl.float64))
    top_k = tl.load(settings + TOP_K_ROW * stride)
    log_min_p = tl.load(numbers + LOG_MIN_P_ROW * stride).to(tl.float32)
    top_p = tl.load(numbers + TOP_P_ROW * stride)
    kept = tl.minimum(_bits(log_min_p), _INFINITY_BITS)
    if top_k > 0:
        needed = tl.minimum(top_k, vocab)
        everything = tl.full([], _INFINITY_BITS, tl.int32)
        kth = _smallest_set(row, vocab, peak, temperature, everything, needed, True, BLOCK)
        kept = tl.minimum(kept, kth)
    total = _total(row, vocab, peak, temperature, kept, BLOCK)
    if top_p < 1:
        needed = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        kept = _smallest_set(row, vocab, peak, temperature, kept, needed, False, BLOCK)
        total = _total(row, vocab, peak, temperature, kept, BLOCK)
    seed = tl.load(settings + SEED_ROW * stride)
    position = tl.load(settings + POSITION_ROW * stride)
    drawn = (_uniform(seed, position) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(drawn, total - 1)  # the product may round up to the total
    return _invert(row, vocab, peak, temperature, kept, target, BLOCK)


# With a compilation of its own for 1 and for multiples of 16, each batch size might compile anew.
@triton.jit(do_not_specialize=["settings_row"])
def sample(
    logits, logits_row, vocab, settings, settings_row,
    token_ids, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). A temperature of 0 takes the likeliest token, the lowest id among ties.

    `logits` float32; `settings` int64, with float64 in the rows from TEMPERATURE on; `token_ids`
    int64, -1 for a row whose maximum is not a finite number.
    """
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_row
    settings += number
    numbers = settings.to(tl.pointer_type(tl.float64))
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    unusable = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        values = tl.load(row + index, mask=index < vocab, other=float("-inf"))
        unusable += ((values != values) | (values == float("inf"))).to(tl.int32)
        highest = tl.maximum(highest, values)
    peak = tl.max(highest, 0)
    token = tl.full([], _NO_TOKEN, tl.int32)
    if (tl.sum(unusable, 0) == 0) & (peak > float("-inf")):
        asked_for = tl.load(numbers + TEMPERATURE_ROW * settings_row)
        if asked_for > 0:
            temperature = tl.maximum(asked_for.to(tl.float32), 1e-30)
            token = _draw(row, vocab, peak, settings, settings_row, temperature, BLOCK)
        else:
            lowest = tl.full([BLOCK], 2147483647, tl.int32)
            for start in range(0, vocab, BLOCK):
                index = start + tl.arange(0, BLOCK)
                values = tl.load(row + index, mask=index < vocab, other=float("-inf"))
                lowest = tl.minimum(lowest, tl.where(values == peak, index, 2147483647))
            token = tl.min(lowest, 0)
    tl.store(token_ids + number, token.to(tl.int64))
