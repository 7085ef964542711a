"""Ctrl-C held back for the milliseconds in which some layers have a token and others do not yet."""

import signal
import threading
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context, to be entered again and again: SIGINT is delivered when it ends. Only the main thread is sent any."""

    def __init__(self) -> None:
        self._usual: Any = None
        self._held: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._usual = signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *raised: object) -> None:
        usual, self._usual = self._usual, None
        if usual is None:
            return
        signal.signal(signal.SIGINT, usual)
        held, self._held = self._held, []
        if held:
            usual(*held[0])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))
