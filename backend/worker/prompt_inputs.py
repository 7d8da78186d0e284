"""Inputs of prompts other than tokens, for each slot: embeddings of ids beyond the vocabulary, positions, features of images.

Token id `vocab + n` of a prompt stands for row n of the request's table. The model's id for images stands for the next feature of
the sequence's images. Behind the positions that a request gives, they go on by one for each token.

With M-RoPE (arXiv:2409.12191) a token has three positions: frame, row and column. Those of text are alike; those of an image
count from the position behind the text ahead of it, and the text behind it goes on behind the largest of them.

Where the tokens of an image see all of each other (Images.sees_whole), a token sees keys up to the end of its image. The
scheduler lets no step end within one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.architectures.description import Images
from backend.core.step import NewRow, Row
from backend.hosted.features import Features
from backend.layers.rotary import RotaryTables


class SlotPrompt(NamedTuple):
    virtual: NDArray[np.int64]  # places in the prompt whose embedding is given
    vectors: Tensor | None  # [virtual, hidden]
    positions: NDArray[np.int64] | None  # [prompt]; with M-RoPE [3, prompt]
    added: tuple[Tensor, ...] = ()  # each [virtual, hidden]
    ends: NDArray[np.int64] | None = None  # [prompt]: one past the last key that a token sees; None: one past its own


class Embedded(NamedTuple):
    """Rows of a flat batch whose embeddings are given."""

    where: Tensor  # [n] int64
    vectors: Tensor  # [n, hidden]
    added: tuple[Tensor, ...] = ()  # each [n, hidden]: added to what the first layers yield, a tensor a layer


class OwnInputs(NamedTuple):
    """The inputs that the rows of a step bring."""

    positions: Tensor  # [tokens] int64; where there are tables, places in them
    embedded: Embedded | None = None
    tables: RotaryTables | None = None  # cos and sin of each token, where a token has three positions that differ
    ends: NDArray[np.int32] | None = None  # [tokens]: one past the last key that each sees; None: one past its own


class ImageSetting(NamedTuple):
    """How a model's prompts take images."""

    images: Images
    features: Callable[[str], Features]  # gets the digest of an image
    axes: tuple[int, ...] = ()  # RopeConfig.axes
    tables: RotaryTables | None = None  # with M-RoPE: cos and sin of all positions


class PromptInputs:
    def __init__(
        self, vocab_size: int, dtype: torch.dtype, device: torch.device, setting: ImageSetting | None = None
    ) -> None:
        """setting: of a model that takes images."""
        self._vocab_size, self._dtype, self._device = vocab_size, dtype, device
        self._setting = setting
        self._axes = None if setting is None else torch.tensor(setting.axes, dtype=torch.int64)
        self._slots: dict[int, SlotPrompt] = {}  # only of sequences that bring something

    def set_row(self, row: NewRow) -> None:
        """Take note of the sequence that takes a slot."""
        if row.images:
            self._slots[row.slot] = self._with_images(row)
            return
        if row.prompt_embeddings is None and row.position_ids is None:
            self._slots.pop(row.slot, None)
            return
        ids = np.array(row.token_ids[: row.num_prompt_tokens], dtype=np.int64)
        virtual = (ids >= self._vocab_size).nonzero()[0]
        vectors = None
        if row.prompt_embeddings is not None:
            data = np.frombuffer(row.prompt_embeddings.data, dtype=np.float32).reshape(row.prompt_embeddings.shape)
            vectors = torch.from_numpy(data[ids[virtual] - self._vocab_size]).to(self._device, self._dtype)
        positions = None if row.position_ids is None else np.array(row.position_ids, dtype=np.int64)
        self._slots[row.slot] = SlotPrompt(virtual, vectors, positions)

    def _with_images(self, row: NewRow) -> SlotPrompt:
        setting = self._setting
        assert setting is not None, "a model that takes no images gets none"
        ids = np.array(row.token_ids[: row.num_prompt_tokens], dtype=np.int64)
        places = (ids == setting.images.token_id).nonzero()[0]
        found = [setting.features(digest) for digest, _ in row.images]
        vectors = torch.cat([each.vectors for each in found]).to(self._device, self._dtype)
        if len(vectors) != len(places):
            raise IndexError(f"slot {row.slot} has {len(places)} tokens of images and features for {len(vectors)}")
        added = tuple(torch.cat(layer).to(self._device, self._dtype) for layer in zip(*(each.added for each in found)))
        positions = None
        if setting.axes:
            grids = [each.grid for each in found]
            positions = rope_positions(len(ids), places, grids)
        ends = ends_of(len(ids), places) if setting.images.sees_whole else None
        return SlotPrompt(places, vectors, positions, added, ends)

    def has_any(self, rows: Sequence[Row]) -> bool:
        return bool(self._slots) and any(row.slot in self._slots for row in rows)

    def apply(self, rows: Sequence[Row], positions: Tensor) -> OwnInputs:
        """The inputs of a step's flat batch, whose tokens have `positions` [tokens]."""
        if not self._slots:
            return OwnInputs(positions)
        moved, by_axis = positions, False
        axes = positions.new_empty(0)
        where: list[NDArray[np.int64]] = []
        vectors: list[Tensor] = []
        added: list[tuple[Tensor, ...]] = []
        start = 0
        for row in rows:
            given = self._slots.get(row.slot)
            end = row.num_computed + row.num_tokens
            tokens = slice(start, start + row.num_tokens)
            if given is not None and given.positions is not None:
                moved = positions.clone() if moved is positions else moved
                of_tokens = torch.from_numpy(_positions(given.positions, row.num_computed, end)).to(self._device)
                moved[tokens] = of_tokens[0] if of_tokens.dim() > 1 else of_tokens
                if of_tokens.dim() > 1 and not by_axis and row.num_computed < given.positions.shape[-1]:
                    axes, by_axis = moved.repeat(3, 1), True
                if by_axis:
                    axes[:, tokens] = of_tokens
            if given is not None and given.vectors is not None:
                first, last = np.searchsorted(given.virtual, (row.num_computed, end))
                where.append(given.virtual[first:last] - row.num_computed + start)
                vectors.append(given.vectors[first:last])
                added.append(tuple(layer[first:last] for layer in given.added))
            start += row.num_tokens
        tables = None
        if by_axis:
            tables, moved = self._tables_of(axes), torch.arange(start, device=self._device)
        if not vectors:
            return OwnInputs(moved, None, tables)
        layers = max(map(len, added))
        none = [each.new_zeros(each.shape) for each in vectors]
        sums = tuple(
            torch.cat([of_row[at] if at < len(of_row) else zero for of_row, zero in zip(added, none)])
            for at in range(layers)
        )
        embedded = Embedded(torch.from_numpy(np.concatenate(where)).to(self._device), torch.cat(vectors), sums)
        return OwnInputs(moved, embedded, tables, self._ends(rows))

    def _ends(self, rows: Sequence[Row]) -> NDArray[np.int32] | None:
        """None where no token of the rows sees a key behind its own."""
        if self._setting is None or not self._setting.images.sees_whole:
            return None
        found, is_plain = [], True
        for row in rows:
            given, end = self._slots.get(row.slot), row.num_computed + row.num_tokens
            ends = np.arange(row.num_computed + 1, end + 1, dtype=np.int32)
            if given is not None and given.ends is not None and row.num_computed < len(given.ends):
                of_prompt = given.ends[row.num_computed : end]
                ends[: len(of_prompt)] = of_prompt
                is_plain = False
            if ends[-1] > end:
                raise IndexError(f"slot {row.slot} is to run up to token {end}, which lies within an image")
            found.append(ends)
        return None if is_plain else np.concatenate(found)

    def _tables_of(self, axes: Tensor) -> RotaryTables:
        """cos and sin [tokens, pairs] of tokens whose three positions are axes [3, tokens]."""
        assert self._setting is not None and self._setting.tables is not None and self._axes is not None
        cos, sin = self._setting.tables
        at = axes.T[:, self._axes.to(axes.device)]  # [tokens, pairs]: the position that rotates each pair
        return cos.gather(0, at).contiguous(), sin.gather(0, at).contiguous()


def rope_positions(num_tokens: int, places: NDArray[np.int64], grids: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """The positions [3, tokens] of a prompt of which `places` are images of rows and columns `grids`, in the same order."""
    positions = np.empty((3, num_tokens), dtype=np.int64)
    at = position = taken = 0
    for rows, columns in grids:
        first = int(places[taken])
        positions[:, at:first] = np.arange(position, position + first - at)
        position += first - at
        end = first + rows * columns
        grid = np.indices((1, rows, columns)).reshape(3, -1)
        positions[:, first:end] = grid + position
        at, position, taken = end, position + max(rows, columns), taken + rows * columns
    positions[:, at:] = np.arange(position, position + num_tokens - at)
    return positions


def ends_of(num_tokens: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """One past the last key that each token of a prompt sees. places: of the tokens of images; neighbours are of one image."""
    ends = np.arange(1, num_tokens + 1)
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    for run in runs if len(places) else ():
        ends[run] = run[-1] + 1
    return ends


def _positions(given: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    """Positions of tokens `start` to `end`: those that were given, then one more for each further token. With three positions a
    token, [3, tokens]; behind the prompt they are alike.
    """
    places, size = np.arange(start, end), given.shape[-1]
    beyond = given[..., -1:].max() + 1 + places - size
    return np.where(places < size, given[..., np.minimum(places, size - 1)], beyond)
