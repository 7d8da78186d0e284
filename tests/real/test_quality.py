"""What each form of weights and KV costs on published weights: the rise of perplexity on 1,000 tokens of text and code.

Measured on SmolLM2-135M-Instruct (Q4_1), with AVX-512, against torch's kernels, which make bfloat16 of the file's blocks and
round no inputs: +0.21, +0.28, +0.27, +0.30, +3.1, +7.7, +0.72, +6.8 and +1.8 %. The weights lie on the grid of Q4_1, which w6a8's
levels nearly hold. Bounds leave room for what other instruction sets round differently.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest

from backend.api import EngineConfig, OutputConfig
from backend.api.config.kv_bits import named
from backend.api.config.schema import Kernels, KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.text.tokenizer import Tokenizer
from tests.model.gathering import Engine
from tests.real.conftest import RealModel

pytestmark = pytest.mark.real
ROWS, ROW_TOKENS = 2, 500
FILES = "statistics.py", "fractions.py"  # of Python's library: prose in docstrings, and code
# (model.quantization, an entry of KV_TYPES) -> the most that perplexity may rise above that of the file's own weights
BOUNDS = {
    ("none", "auto"): 0.004,
    ("int8", "auto"): 0.006,
    ("w8a8", "auto"): 0.013,
    ("w6a8", "auto"): 0.013,
    ("auto:5.2", "auto"): 0.06,
    ("w4a8", "auto"): 0.11,
    ("none", "int8"): 0.010,
    ("none", "int4"): 0.11,
    ("none", "k8v4"): 0.03,
}


def rows(model: RealModel) -> list[list[int]]:
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer = Tokenizer.from_directory(model.path)
    text = "".join((library / name).read_text(encoding="utf-8")[: ROWS * ROW_TOKENS * 3] for name in FILES)
    ids = tokenizer.encode(text)
    step = len(ids) // ROWS
    assert step >= ROW_TOKENS
    return [ids[i * step : i * step + ROW_TOKENS] for i in range(ROWS)]


def perplexity(model: RealModel, quantization: str, kv: str, kernels: Kernels = "auto") -> float:
    engine = Engine(
        EngineConfig(
            ModelConfigSection(
                path=str(model.path),
                quantization=quantization,
                kernels=kernels,
                device="cpu",
                num_threads=1,
                max_seq_len=512,
            ),
            KvCacheConfig(max_tokens=ROWS * 512, **named(kv)),
            SchedulerConfig(max_batch_size=ROWS),
        )
    )
    loss, count = 0.0, 0
    for row in rows(model):
        found = engine.answer(row, 1, OutputConfig(prompt_log_probs=0)).result.prompt_log_probs
        assert found is not None
        loss, count = loss - sum(entry.log_prob for entry in found), count + len(found)
    return math.exp(loss / count)


@pytest.fixture(scope="module")
def of_floats(model: RealModel) -> float:
    """Perplexity with the file's own weights, in bfloat16."""
    return perplexity(model, "none", "auto", "torch")


@pytest.mark.parametrize("quantization, kv", BOUNDS)
def test_perplexity_rises_no_more_than_its_bound(
    model: RealModel, of_floats: float, quantization: str, kv: str
) -> None:
    rise = perplexity(model, quantization, kv) / of_floats - 1
    print(f"{model.name}, {quantization}, KV {kv}: {of_floats:.3f}, {100 * rise:+.2f} %")
    assert rise <= BOUNDS[quantization, kv]
