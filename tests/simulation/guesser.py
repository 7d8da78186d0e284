"""A drafter for random schedules: it knows what each sequence will say, and guesses right and wrong by chance, at any cost."""

from __future__ import annotations

from random import Random

from backend.api.config.schema import SpeculationConfig
from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.scheduler.drafting import Draft, Drafter
from tests.simulation.model import Model


class Guesser(Drafter):
    def __init__(self, model: Model, seed: int) -> None:
        super().__init__(SpeculationConfig())
        self._model, self._seed = model, seed

    def _random(self, seq: Sequence, question: str) -> Random:
        """The same question about the same tokens has the same answer, so that a dropped plan changes nothing."""
        return Random(f"{self._seed} {question} {seq.seq_id} {seq.num_tokens}")

    def waits(self, rows: list[Sequence]) -> bool:
        return self._random(rows[0], "waits").random() < 0.6

    def propose(self, generation: list[Sequence], room: int) -> dict[SequenceId, Draft]:
        drafts = {}
        for seq in generation:
            rng = self._random(seq, "drafts")
            num_output = seq.num_output_tokens
            count = min(rng.randint(0, 6), room, seq.max_output_tokens - num_output - 1)
            if count <= 0 or seq.num_inflight_samples:
                continue
            room -= count
            if rng.random() < 0.3:  # the workers are to guess
                drafts[seq.seq_id] = Draft([], num_guesses=count)
                continue
            truth = self._model.live[seq.request_id].family[seq.sequence_index].tokens
            right = truth[num_output : num_output + rng.randint(0, count)]
            drafts[seq.seq_id] = Draft([*right, *(rng.randrange(4) for _ in range(count - len(right)))])
        return drafts
