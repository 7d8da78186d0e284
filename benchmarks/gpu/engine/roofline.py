"""The least time of a decode step: each operation takes what its bytes or its operations take, one after the other."""

from __future__ import annotations

from benchmarks.gpu.engine.weights import Format, Shape
from benchmarks.gpu.goals import Record
from benchmarks.gpu.machine import floor_us

# Format, batch -> the share of the roofline that is asked for, and wanted. The stretch is 80 % everywhere.
ACCEPTED = {
    "bf16": {1: 0.75, 64: 0.80, 256: 0.80},
    "w8a8kv8": {1: 0.65, 64: 0.75, 256: 0.75},
    "w4a8kv4": {1: 0.50, 64: 0.60, 256: 0.60},
}
STRETCH = 0.80
HOST_FIXED_MS, HOST_ROW_MS = 0.3, 0.008  # Python's share of a step, at most


def step_ms(machine: Record, shape: Shape, format: Format, batch: int, context: int) -> float:
    linears = sum(
        floor_us(
            machine,
            n * k * format.weight_bytes + batch * (format.activation_bytes * k + 2 * n),
            2 * batch * n * k,
            format.rate,
        )
        for n, k in fused(shape)
    )
    head = floor_us(
        machine,
        2 * (shape.vocab * shape.hidden + batch * (shape.vocab + shape.hidden)),
        2 * batch * shape.vocab * shape.hidden,
    )
    attention = floor_us(machine, batch * context * kv_bytes(shape, format))
    return (shape.layers * (linears + attention) + head) / 1000


def fused(shape: Shape) -> list[tuple[int, int]]:
    """n, k of a layer's products: qkv, o, gate_up, down."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        (q + 2 * kv, shape.hidden),
        (shape.hidden, q),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]


def kv_bytes(shape: Shape, format: Format) -> int:
    """Bytes of a token's keys and values in a layer, with two float16 for each quantised row."""
    return 2 * shape.kv_heads * (shape.head_dim * format.kv_bits // 8 + (0 if format.kv_bits == 16 else 4))


def host_goal_ms(batch: int) -> float:
    return HOST_FIXED_MS + HOST_ROW_MS * batch


def judge(format: str, batch: int, share: float) -> str:
    """stretch, pass or miss; "-" where nothing is asked for."""
    least = ACCEPTED.get(format, {}).get(batch)
    if least is None:
        return "-"
    return "stretch" if share >= max(STRETCH, least) else "pass" if share >= least else "miss"
