"""Each family on the native tier: a token's logits are the same, bit for bit, however its prompt was cut, whatever ran beside it,
and when it is computed again, as after an eviction.

A sample of families and formats is tried, EVERBATCH_EVERY=1 tries all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.cpu.library import load_kernels
from tests.families.tiny import FAMILIES, VOCAB
from tests.native.families import Family
from tests.native.harness import Format, prompt
from tests.native.test_invariance import Scene, assert_same, cut

EVERY = int(os.environ.get("EVERBATCH_EVERY", "7"))
LENGTH = 117  # more than three blocks
FORMATS = [
    Format("bfloat16"),
    Format("bfloat16", "w8a8"),
    Format("bfloat16", "w4a8", kv="int4"),
    Format("bfloat16", "w8a8", kv="k8v4"),
    Format("bfloat16", kv="int8"),
    Format("float32", "int8", kv="int8"),
]
CASES = [(name, form) for name in FAMILIES for form in FORMATS]


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name, form", CASES[::EVERY], ids=str)
def test_a_token_s_logits_do_not_depend_on_what_runs_beside_it(
    name: str, form: Format, checkpoint: Callable[..., Path]
) -> None:
    scene = Scene(load_kernels(), Family(checkpoint(name, "bfloat16"), None), form, LENGTH)
    scene.check(scene.driver(seed=3), cut(LENGTH, [1, 31, 2, 30]), slot=2)
    check_again(scene)
    check_beside_others(scene)


def check_again(scene: Scene) -> None:
    driver = scene.driver(seed=5)
    driver.begin(1, scene.all_tokens[:-1])
    assert_same(driver.run(1, [len(scene.all_tokens) - 1]), torch.cat((scene.of_prompt, scene.of_output)))


def check_beside_others(scene: Scene) -> None:
    driver, rng, slots = scene.driver(seed=8), random.Random(8), [0, 1, 2, 3]
    for slot in slots:
        driver.begin(slot, scene.tokens if slot == 2 else prompt(rng.randint(1, 90), VOCAB, seed=slot))
    parts = []
    while driver.computed[2] < len(scene.tokens):
        rng.shuffle(slots)
        left = {slot: len(driver.tokens[slot]) - driver.computed[slot] for slot in slots}
        parts.append(driver.step([(slot, min(left[slot], rng.choice([1, 5, 32, 60]))) for slot in slots])[2])
    assert_same(torch.cat(parts), scene.of_prompt)
    scene.check_output(driver, slots, 2)
