"""Fair use of the event loop by work that takes long, such as the encoding of a reply of many megabytes."""

from __future__ import annotations

import asyncio


class Turns:
    """Whoever has much to do does a few milliseconds of it after each `next`.

    Of all who wait one gets its turn in an iteration of the event loop, in the order in which they came; what others have to
    do, such as the first token of a stream, is done in between.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)
