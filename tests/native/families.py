"""Random models of odd shapes, and random steps for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tests.model.driver import Driver
from tests.model.gguf_files import write_gguf
from tests.native.harness import NUM_SLOTS, Attention, prompt
from tools.make_random_model import make_random_model

VOCAB, LONGEST = 131, 420
PANEL = 32
NUM_FAMILIES = 8


class Family(NamedTuple):
    directory: Path  # a checkpoint in bfloat16, or a GGUF file
    window: int | None  # of the layer that sees most; None: all tokens
    attention: Attention = Attention()


def family_of_super_blocks(directory: Path) -> Family:
    """A GGUF file with what Q4_K_M files have: each type, a layer with rows of two, and a head tied to the embedding."""
    sizes = dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = make_random_model(
        directory, "llama", 0, vocab_size=VOCAB, max_position_embeddings=512, tie_word_embeddings=True, **sizes
    )
    kinds = {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q5_K", "ffn_up": "Q5_K"}
    return Family(
        write_gguf(model, directory / "model.gguf", lambda name: kinds.get(name.split(".")[-2], "Q4_K")), None
    )


def random_family(directory: Path, seed: int) -> Family:
    """Head sizes, heads for each kv head, windows and families differ by the seed.

    Family 0 has windows for each layer and sink tokens, 3 and 6 have a layer that sees all; there are sink tokens in 3.
    """
    rng = random.Random(seed)
    head_dim, ratio = (6, 20, 80, 128)[seed % 4], (1, 3, 7, 8)[(seed + seed // 4) % 4]
    kv_heads = rng.choice([1, 2, 3])
    family = ("llama", "mistral", "qwen3", "qwen2", "llama3", "llama", "qwen2", "mistral")[seed % 8]
    if family == "qwen2":  # transformers takes its head size from the width
        width = head_dim * ratio * kv_heads
    else:
        width = ratio * kv_heads * 2 * rng.randint(3, 9)
    window = rng.randint(20, 90)
    intermediate = rng.randint(30, 200)
    if seed % 2:  # whole panels: many rows then go from gate and up to the next operand at once
        intermediate = -(-intermediate // PANEL) * PANEL
    extra = {
        "mistral": dict(sliding_window=window),
        "qwen2": dict(use_sliding_window=True, sliding_window=window, max_window_layers=1),
        "llama": dict(attention_bias=True, mlp_bias=True),
    }
    path = make_random_model(
        directory,
        family,
        seed,
        vocab_size=VOCAB,
        hidden_size=width,
        head_dim=head_dim,
        intermediate_size=intermediate,
        num_attention_heads=ratio * kv_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=LONGEST,
        dtype="bfloat16",
        **extra.get(family, {}),
    )
    if seed == 0:
        return Family(path, 2 * window, Attention((window, 2 * window), sink_tokens=rng.randint(1, 40)))
    return Family(path, window if family == "mistral" else None, Attention(sink_tokens=5 if seed == 3 else 0))


@dataclass(frozen=True)
class Play:
    """The same random steps for any driver: chunks of prompts and single tokens, slots that begin anew in between."""

    seed: int
    num_steps: int
    longest: int = LONGEST  # tokens of a sequence

    def run(self, driver: Driver) -> list[Tensor]:
        """Logits [tokens, vocab] of every row, in order."""
        rng = random.Random(self.seed)
        lengths = [self.longest, *(rng.randint(2, self.longest) for _ in range(NUM_SLOTS - 1))]
        prompts = [prompt(length, VOCAB, seed=slot) for slot, length in enumerate(lengths)]
        logits: list[Tensor] = []
        for step in range(self.num_steps):
            slots = rng.sample(range(1, NUM_SLOTS), rng.randint(0, NUM_SLOTS - 1))
            slots.insert(rng.randint(0, len(slots)), 0)
            chunks = []
            for slot in slots:
                self._prepare(driver, slot, prompts[slot])
                # The last token is never run, so that nothing is sampled. The first row crosses every border that there is.
                left = lengths[slot] - 1 - driver.computed[slot]
                wanted = 250 if step == slot == 0 else rng.choice([1, 1, 1, 2, 7, 31, 32, 33, 64])
                chunks.append((slot, min(left, wanted)))
            done = driver.step(chunks)
            logits += [done[slot] for slot, _ in chunks]
        return logits

    @staticmethod
    def _prepare(driver: Driver, slot: int, tokens: list[int]) -> None:
        if slot not in driver.tokens or driver.computed[slot] == len(tokens) - 1:
            driver.free += [block for block in driver.tables.get(slot, []) if block >= 0]
            driver.begin(slot, tokens)
        elif driver.computed[slot] % 3 == 0:  # as after a pause: -1 in the table for blocks that have left the window
            driver.begin(slot, tokens, driver.computed[slot], driver.tables[slot])
