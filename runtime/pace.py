"""The pace of a long prompt: how far its forward is ahead of the device.

MLX hands over up to ten buffers of operations before it waits, however much memory these take, and frees an array when
the device is done with it. Fewer operations a layer are more layers under way at once: left alone, a prompt would take
more memory than through mlx-lm. A few layers are as good: the device takes longer for one than the host.
"""

from collections import deque

import mlx.core as mx

from .decode_check import on_gpu
from .evaluation import evaluate, start
from .taps import Tap

LONG = 1024  # tokens of a call from which the device takes longer for a layer than the host
EVERY = 2  # layers that are handed over together
AHEAD = 2  # of these, before it waits for one


def long(tokens: int) -> bool:
    """Whether a call of so many tokens is to be paced: on CUDA, where that was measured (docs/decode.md)."""
    return tokens >= LONG and on_gpu() and mx.cuda.is_available()


def paced(hook: Tap, owners: int) -> Tap:
    """hook, for a call of a long prompt. owners: how many layers have a cache; they come first.

    Those behind are left alone: whoever asks for the caches only never computes them.
    """
    under_way: deque[mx.array] = deque()

    def tap(index: int, rows: mx.array) -> mx.array:
        rows = hook(index, rows)
        if 0 <= index < owners - 1 and index % EVERY == EVERY - 1 and start(rows):
            under_way.append(rows)
            if len(under_way) > AHEAD:
                evaluate(under_way.popleft())
        return rows

    return tap
