"""NativeChoice: chooses tokens on a CPU, in one native call for all rows (kernels/cpu/sampling.py) but those with top-n-sigma,
for which torch operators choose. Logits stay unchanged.
"""

from __future__ import annotations

from ctypes import CDLL

import numpy as np
from torch import Tensor

from backend.core.step import SampledToken, SlotId
from backend.sampling.slots import SlotOptions, SlotParameters
from backend.sampling.torch_choice import TorchChoice
from kernels.cpu.sampling import NativeLogProbs, NativeSampling


class NativeChoice:
    def __init__(self, parameters: SlotParameters, library: CDLL) -> None:
        self._slots = parameters
        self._native = NativeSampling(library)
        self._torch = TorchChoice(parameters)

    def choose(
        self, logits: Tensor, rows: list[int], slots: list[SlotId], token_ids: Tensor, num_tokens: list[int]
    ) -> list[SampledToken]:
        """One SampledToken for each of `rows` of the logits [num_rows, vocab].

        slots and num_tokens are parallel to `rows`; every slot has a row.
        """
        cut = [bool(self._slots.options[slot].n_sigma) for slot in slots]
        if not any(cut):
            return self._choose(logits, rows, slots, token_ids, num_tokens)
        result: list[SampledToken] = []
        for i, is_cut in enumerate(cut):
            own = logits[rows[i] : rows[i] + 1]
            if is_cut:
                result += self._torch.choose(own.clone(), [0], [slots[i]], token_ids, [num_tokens[i]])
            else:
                result += self._choose(own, [0], [slots[i]], token_ids, [num_tokens[i]])
        return result

    def _choose(
        self, logits: Tensor, rows: list[int], slots: list[SlotId], token_ids: Tensor, num_tokens: list[int]
    ) -> list[SampledToken]:
        parameters = self._slots
        samples = np.array([rows, slots, num_tokens], dtype=np.int64)
        widths = parameters.log_prob_widths[samples[1]]
        width = int(widths.max())
        tokens, log_probs = self._native.sample(
            logits, samples, parameters.floats, parameters.ints, token_ids, None if width < 0 else width
        )
        result = list(map(SampledToken, slots, tokens.tolist()))
        if log_probs is not None:
            for i in (widths >= 0).nonzero()[0].tolist():
                result[i] = _with_log_probs(result[i], parameters.options[slots[i]], log_probs, i)
        return result


def _with_log_probs(token: SampledToken, options: SlotOptions, log_probs: NativeLogProbs, i: int) -> SampledToken:
    k = options.top_log_probs
    value = float(log_probs.chosen[i]) if options.return_log_probs else None
    pairs = list(zip(log_probs.top_ids[i, :k].tolist(), log_probs.top[i, :k].tolist()))
    return SampledToken(token.slot, token.token_id, value, pairs)
