"""Recurrent layers and gated attention of the native step: right, and the same bits however a sequence is run."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.decoder import NativeForm, UnknownCell
from kernels.cpu.recurrence import NativeStates
from tests.native.recurrent import MIXERS, STATES, VOCAB, Model, Sequences

LENGTH = 41  # more than a panel of keys, and no multiple of anything
OF_TYPES = [torch.float32, torch.bfloat16]
mixers = pytest.mark.parametrize("name", MIXERS)


def hybrid(name: str, dtype: torch.dtype = torch.float32) -> Model:
    return Model([MIXERS[name], None, MIXERS[name]], dtype=dtype)


def whole(sequences: Sequences, length: int = LENGTH, slot: int = 0, to: int = 0) -> Tensor:
    """Logits of a sequence that one call runs."""
    return sequences.step([(slot, 0, length)], [(-1, to, length)])[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@mixers
def test_logits_and_states_are_those_of_loops_over_tokens(kernels: CDLL, name: str) -> None:
    model = hybrid(name)
    sequences = Sequences(model, kernels)
    logits = whole(sequences)
    expected, states = model.reference(sequences.ids[0, :LENGTH].tolist())
    torch.testing.assert_close(logits.double(), expected, rtol=2e-4, atol=2e-4)
    for pool, state in zip(sequences.states, states, strict=True):
        if pool is not None:
            torch.testing.assert_close(pool[0].double(), state, rtol=2e-4, atol=2e-4)


def test_attention_is_multiplied_with_the_sigmoid_of_its_gates(kernels: CDLL) -> None:
    model = Model([None, MIXERS["convolution"], None], gates_attention=True)
    sequences = Sequences(model, kernels)
    expected, _ = model.reference(sequences.ids[0, :LENGTH].tolist())
    torch.testing.assert_close(whole(sequences).double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [2, 1, 20, 17, 1], [33, 8]], ids=["tokens", "mixed", "two"])
@pytest.mark.parametrize("in_place", [False, True], ids=["two_states", "in_place"])
@pytest.mark.parametrize("dtype", OF_TYPES, ids=str)
@mixers
def test_chunks_yield_the_bits_of_one_call(
    kernels: CDLL, name: str, dtype: torch.dtype, in_place: bool, chunks: list[int]
) -> None:
    sequences = Sequences(hybrid(name, dtype), kernels)
    expected = whole(sequences, to=5)
    sequences.ids[1] = sequences.ids[0]
    done, logits, state = 0, [], -1
    for count in chunks:
        to = 1 if in_place or state != 1 else 2
        logits += sequences.step([(1, done, count)], [(state, to, count)])
        state, done = to, done + count
    assert same_bits(torch.cat(logits), expected)
    assert same_bits(sequences.state(state), sequences.state(5))


@mixers
def test_rows_beside_and_threads_change_no_bit(kernels: CDLL, name: str) -> None:
    sequences = Sequences(hybrid(name), kernels)
    for slot in range(3):
        sequences.step([(slot, 0, 9)], [(-1, slot, 9)])
    rows, state_rows = [(0, 9, 1), (1, 9, 30), (2, 9, 3), (3, 0, 70)], [(0, 6, 1), (1, 7, 30), (2, 8, 3), (-1, 9, 70)]
    alone = [sequences.step([row], [own])[0] for row, own in zip(rows, state_rows, strict=True)]
    states = [sequences.state(own[1]) for own in state_rows]
    for num_threads in (1, 2):
        for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
            for pool in sequences.states:
                if pool is not None:
                    pool[6:10] = torch.nan
            beside = sequences.step([rows[i] for i in order], [state_rows[i] for i in order], num_threads=num_threads)
            for at, i in enumerate(order):
                assert same_bits(beside[at], alone[i])
                assert same_bits(sequences.state(state_rows[i][1]), states[i])


@mixers
def test_tokens_behind_the_count_leave_no_trace(kernels: CDLL, name: str) -> None:
    sequences = Sequences(hybrid(name), kernels)
    expected, all_ids = whole(sequences), sequences.ids.clone()
    sequences.step([(0, 0, 10)], [(-1, 1, 10)])
    after = sequences.state(1)
    sequences.ids[0, 10:16] = (sequences.ids[0, 10:16] + 1) % VOCAB  # drafts that are wrong
    for start in (0, 7):
        before = [] if start == 0 else sequences.step([(0, 0, 7)], [(-1, 2, 7)])
        drafted = sequences.step([(0, start, 16 - start)], [(-1 if start == 0 else 2, 2, 10 - start)])
        assert same_bits(torch.cat([*before, *drafted])[:10], expected[:10])
        assert not same_bits(drafted[0][10 - start :], expected[10:16])
        assert same_bits(sequences.state(2), after)
    sequences.ids.copy_(all_ids)
    assert same_bits(sequences.step([(0, 10, 31)], [(2, 2, 31)])[0], expected[10:])


@mixers
def test_snapshots_are_the_states_behind_their_tokens_and_can_be_gone_on_from(kernels: CDLL, name: str) -> None:
    sequences = Sequences(hybrid(name), kernels)
    expected = whole(sequences)
    counts = [1, 2, 7, 7, 30, LENGTH]
    saves = [(1, count, 3 + i) for i, count in enumerate(counts)]
    logits = sequences.step([(1, 0, 2), (0, 0, LENGTH)], [(-1, 1, 2), (-1, 2, 30)], saves)
    assert same_bits(logits[1], expected)
    for count, state in [(30, 2), *((count, state) for _, count, state in saves)]:
        whole(sequences, count, to=0)
        assert same_bits(sequences.state(state), sequences.state(0)), count
        if count < LENGTH:
            assert same_bits(sequences.step([(0, count, LENGTH - count)], [(state, -1, 0)])[0], expected[count:])


@mixers
def test_a_step_writes_no_state_but_those_it_is_told_to(kernels: CDLL, name: str) -> None:
    sequences = Sequences(hybrid(name), kernels)
    whole(sequences, 5, to=0)
    before = [pool.clone() for pool in sequences.states if pool is not None]
    sequences.step([(0, 5, 4), (0, 5, 4)], [(0, 3, 4), (0, -1, 0)], [(0, 1, 4)])
    for pool, old in zip([pool for pool in sequences.states if pool is not None], before, strict=True):
        changed = [i for i in range(STATES) if not same_bits(pool[i], old[i])]
        assert changed == [3, 4]


def test_a_model_without_attention_needs_no_blocks(best_kernels: CDLL) -> None:
    model = Model([MIXERS["delta"], MIXERS["delta"]])
    sequences = Sequences(model, best_kernels)
    sequences.tables[:] = -1
    expected, _ = model.reference(sequences.ids[0, :LENGTH].tolist())
    torch.testing.assert_close(whole(sequences).double(), expected, rtol=2e-4, atol=2e-4)


BAD: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "from_below": lambda rows, saves: rows.__setitem__((1, 0), -2),
    "from_beyond": lambda rows, saves: rows.__setitem__((1, 0), STATES),
    "to_below": lambda rows, saves: rows.__setitem__((1, 1), -2),
    "to_beyond": lambda rows, saves: rows.__setitem__((1, 1), STATES),
    "count_of_none": lambda rows, saves: rows.__setitem__((1, 2), 0),
    "count_beyond": lambda rows, saves: rows.__setitem__((1, 2), 5),
    "saved_behind_none": lambda rows, saves: saves.__setitem__((1, 1), 0),
    "saved_beyond": lambda rows, saves: saves.__setitem__((1, 1), 5),
    "saved_nowhere": lambda rows, saves: saves.__setitem__((1, 2), -1),
    "saved_to_beyond": lambda rows, saves: saves.__setitem__((1, 2), STATES),
    "unsorted": lambda rows, saves: saves.__setitem__((0, 0), 2),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_states_and_counts_that_do_not_exist_are_refused(
    best_kernels: CDLL, change: Callable[[np.ndarray, np.ndarray], None]
) -> None:
    sequences = Sequences(hybrid("delta"), best_kernels)
    rows = np.array([[0, 0, 3, 1], [1, 0, 4, 1], [2, 0, 4, 1]], dtype=np.int32)
    state_rows, saves = np.array([[-1, 0, 3], [-1, 1, 4], [-1, 2, 4]]), np.array([[0, 2, 4], [1, 4, 5], [2, 4, 6]])
    arguments = (rows, sequences.ids, sequences.tables, sequences.pools)
    states = NativeStates(sequences.states, state_rows.astype(np.int32), saves.astype(np.int32))
    sequences.decoder.check(*arguments, states=states)
    change(states.rows, states.saves)
    for call in (sequences.decoder.check, lambda *given, states: sequences.decoder.step(*given, True, states=states)):
        with pytest.raises(UnknownCell) as refused:
            call(*arguments, states=states)
        assert refused.value.row == 1
    assert sequences.state(0).isnan().all()


def test_a_save_of_a_row_that_there_is_not_is_refused(best_kernels: CDLL) -> None:
    sequences = Sequences(hybrid("sum"), best_kernels)
    for row in (-1, 1):
        with pytest.raises(UnknownCell):
            sequences.step([(0, 0, 3)], [(-1, 0, 3)], [(row, 1, 1)])


def test_states_that_do_not_fit_the_model_are_refused(best_kernels: CDLL) -> None:
    sequences = Sequences(hybrid("delta"), best_kernels)
    arguments = (np.array([[0, 0, 3, 1]], dtype=np.int32), sequences.ids, sequences.tables, sequences.pools, True)
    rows = np.array([[-1, 0, 3]], dtype=np.int32)
    with pytest.raises(ValueError, match="need states"):
        sequences.decoder.step(*arguments)
    with pytest.raises(ValueError, match="do not fit a model"):
        sequences.decoder.step(*arguments, states=NativeStates([None, *sequences.states[1:]], rows))
    with pytest.raises(ValueError, match="the step has 1 rows"):
        sequences.decoder.step(*arguments, states=NativeStates(sequences.states, rows.repeat(2, 0)))


def test_a_recurrence_whose_parts_do_not_fit_is_refused(best_kernels: CDLL) -> None:
    model = Model([MIXERS["delta"]])
    model.weights[0]["rate"] = torch.ones(3)
    with pytest.raises(ValueError, match="rate of a recurrence"):
        model.decoder(best_kernels)
    model = Model([replace(MIXERS["delta"], taps=5)])
    with pytest.raises(ValueError, match="with 5 taps do not fit"):
        model.decoder(best_kernels)
    model = Model([MIXERS["delta"]])
    model.weights[0]["gates"] = model.weights[0]["gates"][1:]
    with pytest.raises(ValueError, match="have .* rows"):
        model.decoder(best_kernels)


@pytest.mark.parametrize(
    "layers, form, message",
    [
        (["delta", None], NativeForm(1e-6, is_parallel=True), "halves are parallel"),
        (["delta", "sum"], NativeForm(1e-6), "results have the sizes"),
    ],
)
def test_models_that_the_kernels_have_no_room_for_are_refused(
    best_kernels: CDLL, layers: list[str | None], form: NativeForm, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Model([name and MIXERS[name] for name in layers]).decoder(best_kernels, form)
