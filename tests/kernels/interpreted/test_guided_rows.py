"""Guides on the runner of a GPU, in the interpreter: masks are made while a step is in flight; outputs are the torch tier's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from backend.api import Request, Result
from backend.api.guide import Guide, GuideType
from backend.api.request import RequestId
from backend.api.response import FinishReason
from backend.core.step import OnCompiled
from backend.engine.core import EngineCore
from backend.worker.guided_rows import GuidedRows
from tests.kernels.interpreted.test_device_runner import Replays, directory, finish, make_core, request  # noqa: F401

GUIDE = Guide(GuideType.REGEX, "stands for: token i of the output leaves the remainder i when it is divided by STRIDE")
STRIDE, LENGTH, END = 7, 9, 1


class Remainders:
    """The matcher of GUIDE, whose outputs have LENGTH tokens and the end."""

    error = ""

    def __init__(self) -> None:
        self.position = 0

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        masks[row] = 0
        if self.position < LENGTH:
            for token_id in range(2 * STRIDE + self.position % STRIDE, 32 * masks.shape[1], STRIDE):
                masks[row].view(np.uint8)[token_id >> 3] |= 1 << (token_id & 7)

    def accept(self, token_id: int) -> bool:
        is_allowed = self.position < LENGTH and token_id % STRIDE == self.position % STRIDE
        self.position += 1
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        self.position -= num_tokens

    @property
    def is_complete(self) -> bool:
        return self.position == LENGTH


class Compiled:
    """All guides are GUIDE, and compiled."""

    def matcher(self, guide: Guide) -> Remainders:
        return Remainders()

    def on_compiled(self, tell: OnCompiled) -> None:
        pass

    def begin(self, request_id: RequestId, guide: Guide, namespace: str = "") -> bool:
        return True

    def end(self, request_id: RequestId) -> None:
        pass

    def notes(self, request_id: RequestId) -> tuple[str, ...]:
        return ()


def take_guides(core: EngineCore) -> EngineCore:
    """The same engine, whose requests may have GUIDE."""
    core.workers.runner.guided = GuidedRows(Compiled(), 5, core.model.vocab_size)
    core.preparation._guides = Compiled()
    core.intake._limits = msgspec.structs.replace(core.intake._limits, guide_refusal="")
    return core


def results(directory: Path, kernels: str, requests: list[Request], **scheduler: object) -> list[Result]:  # noqa: F811
    return finish(take_guides(make_core(directory, kernels, Replays(), **scheduler)), requests)


@pytest.mark.parametrize(("look_ahead", "blocks"), [(True, 60), (False, 4)])
def test_outputs_are_those_of_the_torch_tier_beside_rows_without_guides(
    directory: Path,  # noqa: F811
    look_ahead: bool,
    blocks: int,
) -> None:
    """Prompts of 13 to 25 tokens and 10 of output need 2 or 3 blocks of 16 each: of 4 blocks rows are paused and come back."""
    fields = {"end_ids": (END,)}
    asked = [
        msgspec.structs.replace(request(13 + 4 * n, 12, n, **fields, **sampling), guide=GUIDE if n % 2 == 0 else None)
        for n, sampling in enumerate([{}, {}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_k": 20, "seed": 6}])
    ]  # fmt: skip
    expected = results(directory, "torch", asked)
    measured = results(directory, "triton", asked, look_ahead=look_ahead, blocks=blocks)
    for mine, theirs in zip(measured, expected, strict=True):
        assert mine.output_token_ids == theirs.output_token_ids and mine.finish_reasons == theirs.finish_reasons
    for guided in measured[::2]:
        (ids,) = guided.output_token_ids
        assert guided.finish_reasons == (FinishReason.END_ID,) and ids[-1] == END
        assert [token_id % STRIDE for token_id in ids[:-1]] == [i % STRIDE for i in range(LENGTH)]


def test_drafts_under_a_guide_change_nothing(directory: Path) -> None:  # noqa: F811
    """Right ones, one that the guide forbids (each remainder differs from the next position's), one beyond the end."""
    asked = [
        msgspec.structs.replace(request(13 + 4 * n, 12, n, end_ids=(END,), **sampling), guide=GUIDE)
        for n, sampling in enumerate([{}, {"temperature": 1.0, "seed": 5}, {}])
    ]
    expected = results(directory, "torch", asked)
    truths = [result.output_token_ids[0] for result in expected]
    drafts = [truths[0][:7], [*truths[1][:4], truths[1][4] + 1, truths[1][5]], [*truths[2], END, 5]]
    drafted = [msgspec.structs.replace(each, draft_tokens=draft) for each, draft in zip(asked, drafts)]
    measured = results(directory, "triton", drafted)
    assert [each.output_token_ids for each in measured] == [each.output_token_ids for each in expected]
    assert [each.finish_reasons for each in measured] == [each.finish_reasons for each in expected]
