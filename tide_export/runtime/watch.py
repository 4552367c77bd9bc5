"""Wakes the coroutines of one event loop when requests of a scheduler get tokens or end.

The library writes a byte to a pipe after such a step. That takes no lock of the interpreter, so the thread that runs
the steps never waits for Python.
"""

import asyncio
import contextlib
import os
import weakref

from tide_export.runtime.native import Owned, call, library

READ_BYTES = 4096  # at a time; further bytes wake once more


class Watch:
    """Waits for steps of one scheduler in the running event loop."""

    def __init__(self, scheduler: Owned) -> None:
        """Watches a tide_scheduler."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._reading, self._waiting = reading, list[asyncio.Future[None]]()
        call("scheduler_watch", scheduler, writing)
        loop = asyncio.get_running_loop()
        loop.add_reader(reading, self._wake)
        os.write(writing, b".")  # for what happened before: a request that has ended says nothing more
        self.close = weakref.finalize(self, _close, weakref.ref(loop), scheduler, reading, writing)

    async def news(self) -> None:
        """Waits for the next step that gave a request tokens or ended one."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reading, READ_BYTES)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


def _close(loop: weakref.ref[asyncio.AbstractEventLoop], scheduler: Owned, reading: int, writing: int) -> None:
    library().tide_scheduler_unwatch(scheduler, writing)
    os.close(writing)
    running = loop()
    try:
        if running is not None:
            running.call_soon_threadsafe(_stop_reading, running, reading)
            return
    except RuntimeError:  # it is closed
        pass
    os.close(reading)


def _stop_reading(loop: asyncio.AbstractEventLoop, reading: int) -> None:
    loop.remove_reader(reading)
    os.close(reading)
