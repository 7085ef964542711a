"""Who hands the graph of a token to the device: the thread that built it, or a second one while the first goes on.

On a GPU handing over costs more host time than building does, and MLX lets go of the interpreter meanwhile, so two
threads do both at once. The order of the work on the device is the same, hence the bits are.
"""

import threading
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream


class Inline:
    """mlx-lm's way: on its stream, in the thread that asks."""

    stream: Any = generation_stream

    def submit(self, *arrays: mx.array) -> None:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Nothing is left to hand over."""


class Overlapped:
    """A thread of its own. `submit` returns once it has handed over what was submitted before.

    MLX asks two things of a stream that several threads use: that one at a time evaluates on it, here the second thread
    from the first `submit` until `close`; and that no array with siblings (one of several outputs of a primitive) is
    let go of while it is evaluated. What lives from one token to the next (ids, random keys, the rows of caches) has
    none.
    """

    _idle: list[mx.Stream] = []  # noqa: RUF012  (one for all: MLX never frees a stream)

    def __init__(self) -> None:
        self.stream: mx.Stream = self._take(mx.default_device())
        self._jobs: SimpleQueue[tuple[mx.array, ...] | None] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def _take(cls, device: mx.Device) -> mx.Stream:
        try:
            stream = cls._idle.pop()
        except IndexError:
            return mx.new_thread_unsafe_stream(device)
        return stream if stream.device == device else cls._take(device)

    def submit(self, *arrays: mx.array) -> None:
        """Raises what the device said to an earlier one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="straightline dispatch", daemon=True)
            self._thread.start()
        self._jobs.put(arrays)
        # Waiting lets the other thread have the interpreter at once; it would else get it after up to 5 ms.
        self._taken.get()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Hand over what is left. The stream is then any thread's, and later the next generation's."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if mx.metal.is_available():
            mx.synchronize(self.stream)  # mlx-lm changes Metal's wired limit next, for which nothing may run
        if self._error is None:
            self._idle.append(self.stream)

    def _work(self) -> None:
        while (arrays := self._jobs.get()) is not None:
            self._taken.put(None)
            try:
                if self._error is None:
                    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
            except BaseException as error:
                self._error = error
