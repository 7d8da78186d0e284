"""Drafters for engines of real models that guess by chance, right and wrong, whatever it costs; and costs that do not vary."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from backend.api.config.schema import SpeculationConfig
from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.scheduler.drafting import NO_DRAFT, Draft, Drafter
from backend.scheduler.step_cost import StepCost


class ByChance(Drafter):
    """Drafts for the rows that may have some. The same tokens have the same answer, so a dropped plan changes nothing."""

    def __init__(self) -> None:
        super().__init__(SpeculationConfig())

    def waits(self, rows: list[Sequence]) -> bool:
        return any(seq.request.speculation for seq in rows)

    def propose(self, generation: list[Sequence], room: int) -> dict[SequenceId, Draft]:
        drafts = {}
        for seq in generation:
            most = min(room, seq.max_output_tokens - seq.num_output_tokens - 1)
            if most <= 0 or seq.num_inflight_samples or not seq.request.speculation:
                continue
            draft = self.draft(seq, most, Random(f"{seq.request_id} {seq.num_tokens}"))
            if draft.num_tokens:
                drafts[seq.seq_id] = draft
                room -= draft.num_tokens
        return drafts

    def draft(self, seq: Sequence, most: int, rng: Random) -> Draft:
        raise NotImplementedError


class Prompter(ByChance):
    """Guesses what plain decoding has said: all of it right, or with a wrong token somewhere."""

    def __init__(self, truths: Mapping[int, list[int]], vocab_size: int = 131) -> None:
        """truths: by request id, the whole output of each."""
        super().__init__()
        self._truths, self._vocab_size = truths, vocab_size

    def draft(self, seq: Sequence, most: int, rng: Random) -> Draft:
        start = seq.num_output_tokens
        token_ids = self._truths[seq.request_id][start : start + min(rng.randint(0, 7), most)]
        if token_ids and rng.random() < 0.5:
            wrong = rng.randrange(len(token_ids))
            token_ids[wrong] = (token_ids[wrong] + 1) % self._vocab_size
        return Draft(token_ids)


class Asker(ByChance):
    """Asks the workers' draft model for 0 to 6 guesses. In one step of three for none."""

    def draft(self, seq: Sequence, most: int, rng: Random) -> Draft:
        count = min(rng.choice((0, 1, 2, 4, 6, 0)), most)
        return Draft([], num_guesses=count) if count else NO_DRAFT


class FixedStepCost(StepCost):
    """Whatever was measured, a step takes 1 and a hundredth for each token. There are no trials."""

    def note(self, num_tokens: int, seconds: float, num_passes: int = 0) -> None:
        pass

    def _expected(self, num_tokens: int, num_passes: int = 0) -> float:
        return 1 + 0.01 * num_tokens


class FixedPassCost(StepCost):
    """Whatever was measured, a step takes 1 and a fifth for each pass of the draft model."""

    def note(self, num_tokens: int, seconds: float, num_passes: int = 0) -> None:
        super().note(num_tokens, 1 + 0.2 * num_passes, num_passes)
