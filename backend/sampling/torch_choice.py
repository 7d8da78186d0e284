"""TorchChoice: chooses tokens with torch operators on any device. It is the reference of kernels/cpu/sampling.py.

Order of side effects in `choose`: log-softmax of the rows that ask for log-probabilities is taken from the model's own logits;
then the logits are changed in place (bad words, bias and min_tokens as sparse additions, top-n-sigma, penalties); then the
tokens are chosen; then the results go to the host in one copy. The token buffer is only read.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from backend.core.step import SampledToken, SlotId
from backend.sampling.slots import SlotOptions, SlotParameters
from kernels import sampling as kernel
from kernels.common.transfer import place
from kernels.cpu.sampling import FloatColumn, IntColumn


class TorchChoice:
    def __init__(self, parameters: SlotParameters) -> None:
        self._slots = parameters
        self.device = parameters.device

    @torch.inference_mode()
    def choose(
        self, logits: Tensor, rows: list[int], slots: list[SlotId], token_ids: Tensor, num_tokens: list[int]
    ) -> list[SampledToken]:
        """One SampledToken for each of `rows` of the logits [num_rows, vocab], which are overwritten.

        slots and num_tokens are parallel to `rows`; every slot has a row.
        """
        logits = self._pick(logits, rows)
        options = [self._slots.options[slot] for slot in slots]
        asking = [i for i, row in enumerate(options) if row.wants_log_probs]
        log_probs = torch.log_softmax(self._pick(logits, asking), dim=-1) if asking else None
        add_sparse(logits, options, slots, token_ids, num_tokens, is_own=True)
        self._penalize(logits, options, slots, token_ids, num_tokens)
        chosen = self._choose(logits, options, slots, num_tokens)
        if log_probs is None:
            return list(map(SampledToken, slots, chosen.tolist()))
        return self._with_log_probs(chosen, log_probs, asking, options, slots)

    # ---------------------------------------------------------------------------------------------- changes to logits

    def _penalize(
        self, logits: Tensor, rows: list[SlotOptions], slots: list[SlotId], token_ids: Tensor, num_tokens: list[int]
    ) -> None:
        picked = [i for i, row in enumerate(rows) if row.has_penalties]
        if not picked:
            return
        slot = self._ints([slots[i] for i in picked])
        known = [num_tokens[i] for i in picked]
        floats = self._slots.floats[[slots[i] for i in picked]].float().to(self.device)
        num_prompt = self._slots.ints[[slots[i] for i in picked], IntColumn.NUM_PROMPT].to(self.device)
        changed = kernel.penalize(
            self._pick(logits, picked),
            token_ids[slot, : max(known)],
            num_prompt,
            self._ints(known),
            floats[:, FloatColumn.REPETITION],
            floats[:, FloatColumn.PRESENCE],
            floats[:, FloatColumn.FREQUENCY],
        )
        logits.index_copy_(0, self._ints(picked), changed)

    # --------------------------------------------------------------------------------------------------------- choice

    def _choose(self, logits: Tensor, rows: list[SlotOptions], slots: list[SlotId], num_tokens: list[int]) -> Tensor:
        """Token ids [num_rows] int64 on the device."""
        greedy = [i for i, row in enumerate(rows) if row.is_greedy]
        if len(greedy) == len(rows):
            return logits.argmax(dim=-1)  # argmax returns the lowest id among equal logits
        plain = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
        filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
        chosen = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if greedy:
            chosen[self._ints(greedy)] = self._pick(logits, greedy).argmax(dim=-1)
        for picked in (plain, filtered):
            if picked:
                k_max = max(rows[i].top_k for i in picked) if picked is filtered else 0
                known = self._ints([num_tokens[i] for i in picked])
                slot = [slots[i] for i in picked]
                chosen[self._ints(picked)] = self._draw(self._pick(logits, picked), slot, known, k_max)
        return chosen

    def _draw(self, logits: Tensor, slots: list[SlotId], known: Tensor, k_max: int) -> Tensor:
        """Token ids of rows that are either all filtered (`k_max` > 0) or all unfiltered (`k_max` 0)."""
        floats, ints = self._slots.floats[slots].to(self.device), self._slots.ints[slots].to(self.device)
        u = kernel.uniform(ints[:, IntColumn.SEED], ints[:, IntColumn.COUNTER_BASE] + known)
        temperature = floats[:, FloatColumn.TEMPERATURE].float()
        filters = (ints[:, IntColumn.TOP_K], floats[:, FloatColumn.TOP_P], floats[:, FloatColumn.MIN_P])
        return kernel.sample(logits, temperature, u, filters if k_max else None, k_max)

    # --------------------------------------------------------------------------------------------------------- result

    def _with_log_probs(
        self, chosen: Tensor, log_probs: Tensor, asking: list[int], rows: list[SlotOptions], slots: list[SlotId]
    ) -> list[SampledToken]:
        """Pack tokens, log-probabilities and alternatives into one float64 tensor (ids are exact in it), copy once."""
        k_max = max(rows[i].top_log_probs for i in asking)
        own = log_probs.gather(1, chosen[self._ints(asking)][:, None])  # [asking, 1]
        top, ids = kernel.top_log_probs(log_probs, k_max) if k_max else (own[:, :0], own[:, :0])
        packed = torch.cat([chosen.double(), torch.cat([own.double(), top.double(), ids.double()], dim=1).flatten()])
        numbers = packed.tolist()
        tokens, details = [int(number) for number in numbers[: len(rows)]], numbers[len(rows) :]
        result = list(map(SampledToken, slots, tokens))
        for j, i in enumerate(asking):
            own_value, *rest = details[j * (1 + 2 * k_max) : (j + 1) * (1 + 2 * k_max)]
            pairs = list(zip(map(int, rest[k_max:]), rest))[: rows[i].top_log_probs]
            value = own_value if rows[i].return_log_probs else None
            result[i] = SampledToken(slots[i], tokens[i], value, pairs)
        return result

    # -------------------------------------------------------------------------------------------------------- helpers

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _pick(self, logits: Tensor, picked: list[int]) -> Tensor:
        """The picked rows of `logits`; the tensor itself if all rows are picked."""
        return logits if len(picked) == len(logits) else logits[self._ints(picked)]


def add_sparse(
    logits: Tensor, rows: list[SlotOptions], slots: list[SlotId], token_ids: Tensor, num_tokens: list[int], is_own: bool
) -> Tensor:
    """Add the logit bias, and -inf for bad words, repeated n-grams and end ids before min_tokens; then apply top-n-sigma.

    Each logit gets at most one finite term that is not 0.

    logits float32 [rows, vocab] are changed in place if `is_own`, else copied before the first change.
    """
    device = logits.device
    where: list[int] = []  # the row of each addition
    ids: list[Tensor] = []
    values: list[Tensor] = []
    for i, (row, slot, known) in enumerate(zip(rows, slots, num_tokens)):
        parts = []
        if row.bias is not None:
            parts.append(row.bias)
        if row.end_ids is not None and known - row.num_prompt_tokens < row.min_tokens:
            parts.append((row.end_ids, torch.full(row.end_ids.shape, -torch.inf, device=device)))
        if row.words is not None:
            parts.append(_bad_words(*row.words, token_ids[slot], known))
        if 0 < row.ngram <= known:
            parts.append(_repeats(token_ids[slot, :known], row.ngram))
        for part_ids, part_values in parts:
            where += [i] * len(part_ids)
            ids.append(part_ids)
            values.append(part_values)
    cut = [i for i, row in enumerate(rows) if row.n_sigma]
    if not where and not cut:
        return logits
    logits = logits if is_own else logits.clone()
    if where:
        logits.index_put_((place(np.array(where), device), torch.cat(ids)), torch.cat(values), accumulate=True)
    for i in cut:
        keep_top_n_sigma(logits[i], rows[i].n_sigma)
    return logits


def keep_top_n_sigma(logits: Tensor, n: float) -> None:
    """Set logits [vocab] to -inf that are below the greatest one less n standard deviations of all finite ones, in place.

    A row by itself, so that rows beside it cannot change the rounding of its sums. As llama.cpp's sampler of this name, of
    Tang et al. 2024, Top-n-sigma: Not All Logits Are You Need.
    """
    finite = logits.isfinite()
    count = finite.sum()
    values = logits.double()
    mean = torch.where(finite, values, 0.0).sum() / count
    variance = torch.where(finite, (values - mean) ** 2, 0.0).sum() / count
    logits.masked_fill_(values < values.max() - n * variance.sqrt(), -torch.inf)


def _bad_words(words: Tensor, lengths: Tensor, tokens: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """Returns the last token of each bad word, and -inf if the known tokens end with the rest of the word, else 0."""
    count = torch.full((1,), known, device=tokens.device).expand(len(words))
    hit = kernel.tail_matches(tokens.expand(len(words), -1), count, words, lengths)
    return words[:, -1], torch.zeros(len(words), device=tokens.device).masked_fill_(hit, -torch.inf)


def _repeats(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the last token of each run of `size` known tokens, and -inf if another one would repeat that run, else 0."""
    ids, hit = kernel.repeated(tokens, size)
    return ids, torch.zeros(len(ids), device=tokens.device).masked_fill_(hit, -torch.inf)
