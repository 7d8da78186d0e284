"""Sampler: logits of the rows that sample in, one token per row out.

Order of side effects in `sample`: log-softmax of the rows that ask for log-probabilities is taken from the model's
own logits; then the logits are changed in place (bad words, bias and min_tokens as sparse additions, then penalties);
then the tokens are chosen; then everything the caller gets crosses to the host in one copy. The token buffer is only
read.

Nothing is remembered between calls except what `set_row` stored: penalties and bad words are read off the token
buffer, random numbers are a function of (seed, number of tokens sampled), so an evicted sequence that returns goes on
unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.core.step import NewRow, SampledToken, SlotId
from backend.sampling import slots as columns
from backend.sampling.slots import SlotOptions, SlotParameters
from kernels import sampling as kernel


class Sampler:
    """Chooses tokens for the rows of the persistent batch. See SamplingConfig for the meaning of the parameters."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        if not 1 <= vocab_size <= kernel.MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}, allowed is 1 to {kernel.MAX_VOCAB}; use a smaller one")
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self._slots = SlotParameters(num_slots, vocab_size, self.device)

    def set_row(self, new_row: NewRow) -> None:
        """Remember the parameters of the sequence that takes `new_row.slot`; they hold until the slot's next NewRow."""
        self._slots.set_row(new_row)

    def sample(self, logits: Tensor, slots: list[int], token_ids: Tensor, num_tokens: list[int]) -> list[SampledToken]:
        """Choose the next token of each row; one SampledToken per row, in row order.

        logits [num_rows, vocab] float32, overwritten; slots and num_tokens (known tokens) are parallel to its rows;
        token_ids [num_slots, max_seq_len] int64 is the token buffer. Raises ValueError when shapes disagree or a slot
        has no row.
        """
        self._check(logits, slots, num_tokens)
        if not slots:
            return []
        rows = [self._slots.options[slot] for slot in slots]
        asking = [i for i, row in enumerate(rows) if row.wants_log_probs]
        log_probs = torch.log_softmax(self._pick(logits, asking), dim=-1) if asking else None
        self._add_sparse(logits, rows, slots, token_ids, num_tokens)
        self._penalize(logits, rows, slots, token_ids, num_tokens)
        chosen = self._choose(logits, rows, slots, num_tokens)
        if log_probs is None:
            return [SampledToken(SlotId(slot), token) for slot, token in zip(slots, chosen.tolist())]
        return self._with_log_probs(chosen, log_probs, asking, rows, slots)

    def _check(self, logits: Tensor, slots: list[int], num_tokens: list[int]) -> None:
        if logits.shape != (len(slots), self.vocab_size) or len(num_tokens) != len(slots):
            raise ValueError(
                f"logits have shape {list(logits.shape)} for {len(slots)} slots and {len(num_tokens)} lengths, "
                f"expected is [{len(slots)}, {self.vocab_size}]; pass one row and one length per slot"
            )
        for slot in slots:
            if self._slots.options[slot] is None:
                raise ValueError(f"slot {slot} has no sampling parameters; call set_row with its NewRow first")

    # ---------------------------------------------------------------------------------------------- changes to logits

    def _add_sparse(
        self, logits: Tensor, rows: list[SlotOptions], slots: list[int], token_ids: Tensor, num_tokens: list[int]
    ) -> None:
        """Add logit bias, and -inf for bad words and for end ids before min_tokens: one finite term a logit at most."""
        where: list[int] = []  # row of each part
        ids: list[Tensor] = []
        values: list[Tensor] = []
        for i, (row, slot, known) in enumerate(zip(rows, slots, num_tokens)):
            parts = []
            if row.bias is not None:
                parts.append(row.bias)
            if row.end_ids is not None and known - row.num_prompt_tokens < row.min_tokens:
                parts.append((row.end_ids, torch.full(row.end_ids.shape, -torch.inf, device=self.device)))
            if row.words is not None:
                parts.append(self._bad_words(*row.words, token_ids[slot], known))
            for part_ids, part_values in parts:
                where.append(i)
                ids.append(part_ids)
                values.append(part_values)
        if where:
            row_of = torch.repeat_interleave(self._ints(where), self._ints([len(part) for part in ids]))
            logits.index_put_((row_of, torch.cat(ids)), torch.cat(values), accumulate=True)

    def _bad_words(self, words: Tensor, lengths: Tensor, tokens: Tensor, known: int) -> tuple[Tensor, Tensor]:
        """(last tokens of the row's bad words, -inf where the rest of the word is there already, else 0)."""
        count = self._ints([known]).expand(len(words))
        hit = kernel.tail_matches(tokens.expand(len(words), -1), count, words, lengths)
        return words[:, -1], torch.zeros(len(words), device=self.device).masked_fill_(hit, -torch.inf)

    def _penalize(
        self, logits: Tensor, rows: list[SlotOptions], slots: list[int], token_ids: Tensor, num_tokens: list[int]
    ) -> None:
        picked = [i for i, row in enumerate(rows) if row.has_penalties]
        if not picked:
            return
        slot = self._ints([slots[i] for i in picked])
        known = [num_tokens[i] for i in picked]
        floats = self._slots.floats[slot].float()
        changed = kernel.penalize(
            self._pick(logits, picked),
            token_ids[slot, : max(known)],
            self._slots.ints[slot, columns.NUM_PROMPT],
            self._ints(known),
            floats[:, columns.REPETITION],
            floats[:, columns.PRESENCE],
            floats[:, columns.FREQUENCY],
        )
        logits.index_copy_(0, self._ints(picked), changed)

    # --------------------------------------------------------------------------------------------------------- choice

    def _choose(self, logits: Tensor, rows: list[SlotOptions], slots: list[int], num_tokens: list[int]) -> Tensor:
        """Token ids [num_rows] int64 on the device."""
        greedy = [i for i, row in enumerate(rows) if row.is_greedy]
        if len(greedy) == len(rows):
            return logits.argmax(dim=-1)  # the first, hence lowest, of equal ones
        plain = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
        filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
        chosen = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if greedy:
            chosen[self._ints(greedy)] = self._pick(logits, greedy).argmax(dim=-1)
        for picked in (plain, filtered):
            if picked:
                k_max = max(rows[i].top_k for i in picked) if picked is filtered else 0
                known = self._ints([num_tokens[i] for i in picked])
                slot = self._ints([slots[i] for i in picked])
                chosen[self._ints(picked)] = self._draw(self._pick(logits, picked), slot, known, k_max)
        return chosen

    def _draw(self, logits: Tensor, slot: Tensor, known: Tensor, k_max: int) -> Tensor:
        """Token ids of rows that are all filtered (`k_max` > 0) or all unfiltered (0)."""
        floats, ints = self._slots.floats[slot], self._slots.ints[slot]
        u = kernel.uniform(ints[:, columns.SEED], ints[:, columns.COUNTER_BASE] + known)
        temperature = floats[:, columns.TEMPERATURE].float()
        filters = (ints[:, columns.TOP_K], floats[:, columns.TOP_P], floats[:, columns.MIN_P])
        return kernel.sample(logits, temperature, u, filters if k_max else None, k_max)

    # --------------------------------------------------------------------------------------------------------- result

    def _with_log_probs(
        self, chosen: Tensor, log_probs: Tensor, asking: list[int], rows: list[SlotOptions], slots: list[int]
    ) -> list[SampledToken]:
        """Pack tokens, log-probabilities and alternatives into one float64 tensor (ids are exact in it), copy once."""
        k_max = max(rows[i].top_log_probs for i in asking)
        own = log_probs.gather(1, chosen[self._ints(asking)][:, None])  # [asking, 1]
        top, ids = kernel.top_log_probs(log_probs, k_max) if k_max else (own[:, :0], own[:, :0])
        packed = torch.cat([chosen.double(), torch.cat([own.double(), top.double(), ids.double()], dim=1).flatten()])
        numbers = packed.tolist()
        tokens, details = [int(number) for number in numbers[: len(rows)]], numbers[len(rows) :]
        result = [SampledToken(SlotId(slot), token) for slot, token in zip(slots, tokens)]
        for j, i in enumerate(asking):
            own_value, *rest = details[j * (1 + 2 * k_max) : (j + 1) * (1 + 2 * k_max)]
            pairs = list(zip(map(int, rest[k_max:]), rest))[: rows[i].top_log_probs]
            value = own_value if rows[i].return_log_probs else None
            result[i] = SampledToken(SlotId(slots[i]), tokens[i], value, pairs)
        return result

    # -------------------------------------------------------------------------------------------------------- helpers

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _pick(self, logits: Tensor, picked: list[int]) -> Tensor:
        """The picked rows of `logits`; the tensor itself when that is all of them."""
        return logits if len(picked) == len(logits) else logits[self._ints(picked)]
