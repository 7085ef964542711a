"""One thread may build a model's next call while another hands the last one to the device (decoding/dispatchers.py).

MLX lets one thread at a time evaluate what hangs together. So whatever evaluates arrays of a model or of its caches
while the model is called waits first.
"""

import threading
from collections.abc import Callable


class _Waits(threading.local):
    """Of the thread that builds: one entry for each generation under way."""

    def __init__(self) -> None:
        self.all: list[Callable[[], None]] = []


_waits = _Waits()


def begin(wait: Callable[[], None]) -> Callable[[], None]:
    """From now on `wait_for_handover` calls `wait` in this thread, until what is returned is called, in any thread."""
    waits = _waits.all
    waits.append(wait)
    return lambda: waits.remove(wait)


def wait_for_handover() -> None:
    """Until all that this thread has built for others to hand over is handed over."""
    for wait in _waits.all:
        wait()
