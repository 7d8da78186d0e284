"""Damaged blocks of a second level: never a wrong token. `python -m tests.hostile_blocks` damages a thousand."""

from __future__ import annotations

import os
from random import Random

from tests.hostile_blocks import Damage, run

NUM_BLOCKS = 1000 if "EVERBATCH_EVERY" in os.environ else 54


def test_no_damaged_block_is_used() -> None:
    found = run(NUM_BLOCKS)
    assert found["wrong answers"] == 0
    assert all(found[f"damage: {name}"] >= 6 for name in Damage(Random()).ways)
    assert all(found[f"missed: {reason}"] for reason in ("damaged", "stale", "foreign")), found
    assert found["blocks used"] > 10 * NUM_BLOCKS, "blocks that are whole are still used"
