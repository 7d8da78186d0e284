"""benchmarks/postprocess.py counts what becomes text."""

from __future__ import annotations

import pytest

from benchmarks import postprocess
from compat.llm import SamplingParams


@pytest.mark.parametrize("processes", [0, 1])
def test_every_token_of_the_script_becomes_text(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STREAMS": 3, "TOKENS": 4, "ROUNDS": 1}.items():
        monkeypatch.setattr(postprocess, name, value)
    program, others = postprocess.costs(SamplingParams(max_tokens=4, ignore_eos=True, logprobs=5), processes)
    assert program > 0
    assert others >= 0 and (processes or others == 0)
