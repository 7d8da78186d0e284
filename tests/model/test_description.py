"""Each field of a description does what its formula says: the decoder against one that computes it plainly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.layers.linear import make_torch_linear
from backend.models.decoder import Decoder, build_decoder
from backend.models.linears import LinearOptions
from kernels.common.kv_format import PlainPool
from kernels.paged_attention import AttentionRows, plan_attention
from tests.model.descriptions import CASES
from tests.model.plain_decoder import PlainDecoder, random_tensors

BLOCK_SIZE = 4
TEXTS = [[int(token) for token in np.random.default_rng(row).integers(0, 50, size)] for row, size in enumerate((11, 7))]
# The tokens that each text runs in a step: whole texts, chunks, and one by one.
STEPS = [[(11, 7)], [(5, 2), (4, 1), (1, 1), (1, 3)], [(1, 1)] * 7 + [(4, 0)]]


class Run:
    """The texts on their way through a decoder."""

    def __init__(self, config: ModelConfig, model: Decoder, dtype: torch.dtype = torch.float32) -> None:
        self._config, self._model, self._dtype = config, model, dtype
        layout = PlainPool(BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
        self._tables = np.arange(10, dtype=np.int32)[::-1].reshape(2, 5).copy()
        self._pools = [layout.view(torch.full((10, *layout.block_shape), torch.nan).to(dtype)) for _ in config.layers]
        self._done = np.zeros(2, dtype=np.int64)

    def step(self, counts: tuple[int, ...]) -> list[Tensor]:
        """Run the next tokens of each text; returns their logits."""
        rows = [row for row, count in enumerate(counts) if count]
        starts = np.concatenate(([0], np.cumsum([counts[row] for row in rows])))
        positions = [np.arange(self._done[row], self._done[row] + counts[row]) for row in rows]
        cells = [self._tables[row][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in zip(rows, positions)]
        tokens = [TEXTS[row][position] for row, of_row in zip(rows, positions) for position in of_row]
        self._done += counts
        where = AttentionRows(starts, self._done[rows], self._tables[rows])
        config, cpu = self._config, torch.device("cpu")
        plans = plan_attention(where, BLOCK_SIZE, config.windows, config.head_dim, self._dtype, cpu)
        flat = (torch.from_numpy(np.concatenate(each).astype(np.int64)) for each in (positions, cells))
        hidden = self._model.forward(torch.tensor(tokens), *flat, plans, self._pools)
        parts = self._model.logits(hidden).split([counts[row] for row in rows])
        return [parts[rows.index(row)] if row in rows else parts[0][:0] for row in range(len(counts))]


def logits_of(config: ModelConfig, model: Decoder, steps: list[tuple[int, ...]]) -> list[Tensor]:
    run = Run(config, model)
    of_steps = [run.step(counts) for counts in steps]
    return [torch.cat([of_step[row] for of_step in of_steps]) for row in range(len(TEXTS))]


def built(config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Decoder:
    options = LinearOptions(make=make_torch_linear)
    return build_decoder(config, tensors, config.max_position, dtype, torch.device("cpu"), options)


@pytest.mark.parametrize("name", CASES)
def test_the_decoder_computes_what_the_formulas_say(name: str) -> None:
    config = CASES[name]
    tensors = random_tensors(config)
    model, plain = built(config, tensors), PlainDecoder(config, tensors)
    expected = [plain.logits(text) for text in TEXTS]
    for steps in STEPS:
        for measured, wanted in zip(logits_of(config, model, steps), expected, strict=True):
            assert measured.shape == wanted.shape
            assert ((measured - wanted).abs() / (1 + wanted.abs())).max() < 1e-4


LLAMA = random_tensors(CASES["Llama"])


@pytest.mark.parametrize(
    "name", [name for name in CASES if name != "Llama" and set(random_tensors(CASES[name])) == set(LLAMA)]
)
def test_fields_that_need_no_other_tensors_change_the_result(name: str) -> None:
    """Fields that the plain decoder ignored as well would prove nothing above."""
    measured, llama = (PlainDecoder(CASES[each], LLAMA).logits(TEXTS[0]) for each in (name, "Llama"))
    assert (measured - llama).norm() > 0.02 * llama.norm()


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_near(name: str) -> None:
    config = CASES[name]
    tensors = {key: tensor.bfloat16().float() for key, tensor in random_tensors(config).items()}
    model, plain = built(config, tensors, torch.bfloat16), PlainDecoder(config, tensors)
    run = Run(config, model, torch.bfloat16)
    for measured, text in zip(run.step((11, 7)), TEXTS, strict=True):
        wanted = plain.logits(text)
        assert measured.dtype == torch.bfloat16
        assert (measured - wanted).norm() < 0.06 * wanted.norm()
