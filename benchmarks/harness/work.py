"""The load that every server gets: cells (a length pair and a number of users), and the prompts of each cell.

Prompts are token ids, so that every server computes the same number of tokens, whatever its tokenizer would make of a text. They
are drawn anew in each repeat, so that no prompt is found in a cache. In a cell with conversations the history of a turn is the
same for every server too: what stands in it as earlier answers was drawn beforehand, and is not what the server said.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ID = 16  # smaller ids are often special tokens


@dataclass(frozen=True)
class Cell:
    """`prompt` and `new`: tokens of a request (of a turn, where there are conversations). `users`: requests at a time.

    `conversations`: 0 for requests that have nothing to do with each other. `history`: tokens more in the prompt of a
    conversation's first turn. `others`: prompts of further lengths, which take turns with the first.
    """

    prompt: int
    new: int
    users: int
    conversations: int = 0
    turns: int = 1
    history: int = 0
    others: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Stands for the cell in a table and in the results: `512:512, 4 users`."""
        users = f"{self.users} user{'s' if self.users > 1 else ''}"
        words = f"{self.conversations} conversation{'s' if self.conversations > 1 else ''}"
        several = f", {words} of {self.turns} turns" if self.conversations else ""
        after = f" after {self.history}" if self.history else ""
        return f"{','.join(map(str, self.lengths))}:{self.new}, {users}{several}{after}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of prompts that requests take in turn."""
        return (self.prompt, *self.others)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: all turns with their answers."""
        return self.history + (max(self.lengths) + self.new) * self.turns


@dataclass(frozen=True)
class Ask:
    """One request. `turn` counts from 0. `conversation`: its number, from 1; `fresh`: the last tokens of it, which are new."""

    name: str
    prompt: list[int]
    new: int
    turn: int = 0
    conversation: int = 0
    fresh: int = 0


def asks_of(cell: Cell, vocab_size: int, repeat: int, per_user: int) -> list[Ask]:
    """The requests of a cell, in the order in which they are sent."""
    rng = random.Random(f"{cell.name} {repeat}")
    draw = lambda number: [rng.randrange(FIRST_ID, vocab_size) for _ in range(number)]
    if not cell.conversations:
        lengths = cell.lengths
        number = cell.users * per_user
        return [Ask(f"r{place}", draw(lengths[place % len(lengths)]), cell.new) for place in range(number)]
    histories: list[list[int]] = [[] for _ in range(cell.conversations)]
    asks = []
    for turn in range(cell.turns):
        fresh = cell.prompt + (0 if turn else cell.history)
        for place, history in enumerate(histories):  # every other conversation comes between two turns of one
            history += draw(fresh)
            asks.append(Ask(f"c{place}t{turn}", list(history), cell.new, turn, place + 1, fresh))
            history += draw(cell.new)
    return asks


def warm_asks(users: int, vocab_size: int, seed: str) -> list[Ask]:
    """Short requests, one a user, whose figures do not count."""
    rng = random.Random(seed)
    return [Ask(f"w{user}", [rng.randrange(FIRST_ID, vocab_size) for _ in range(8)], 4) for user in range(users)]


def kv_tokens_for(cells: Sequence[Cell], block: int = 128) -> int:
    """Tokens of KV that the servers get for these cells, a multiple of `block`, the largest block of a server.

    Without conversations: room for all users of the largest cell, and a quarter more. With them: half of what all conversations
    come to, but enough for the users that are answered at the same time.
    """
    needed = 0
    for cell in cells:
        at_once = cell.users * -(-cell.longest // block) * block + block
        half = cell.conversations * cell.longest // 2
        needed = max(needed, at_once, half) if cell.conversations else max(needed, at_once * 5 // 4)
    return -(-needed // block) * block
