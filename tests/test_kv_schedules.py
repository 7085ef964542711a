"""B59: thousands of steps of (append k, take r back), fed with keys and values, for every class that can, and batch.

Beside each cache goes a clean one that only ever gets tokens which are not taken back. Before an append both have the
same state, and in it both attend the same, bit for bit; now and then also as dense attention over the true history.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparing import assert_same
from kv_reference import DIM, HEADS, Rows, attend, dense, stored
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from straightline.runtime import StraightlineError
from straightline.runtime.kv import (
    GrowingKVCache,
    KVCache,
    QuantizedGrowingCache,
    QuantizedRingCache,
    QuantizedRollbackCache,
    RotatingKVCache,
    SlidingRollbackCache,
)

STEPS = 2000
POOL = 512  # tokens to draw from
LONGEST = 400  # tokens that the dense attention goes over
PROMPTS = (5, 2)  # of the rows of a batch


@dataclass(frozen=True)
class Kind:
    """depth: how far it goes back behind the furthest token. longest: it starts anew before it holds more than this."""

    make: Callable[[], Any]
    window: int | None = None
    depth: int = 16
    longest: int = 100
    together: tuple[int, ...] = ()

    def new(self, pool: Rows) -> Any:
        """Empty; or a batch with a prompt in each row, padded on the left."""
        if not self.together:
            return self.make()
        solo = [self.make() for _ in self.together]
        for row, (one, length) in enumerate(zip(solo, self.together, strict=True)):
            one.update_and_fetch(*(rows[row : row + 1, :, :length] for rows in pool))
        return solo[0].merge(solo)


RING = 24  # a ring takes tokens back until it is full
ENDLESS = 1 << 30
KINDS = {
    "sliding": Kind(lambda: SlidingRollbackCache(8, 4), 8, 4, ENDLESS),
    "sliding, depth 1": Kind(lambda: SlidingRollbackCache(7, 1), 7, 1),
    "sliding, deeper than the window": Kind(lambda: SlidingRollbackCache(3, 16), 3, 16),
    "sliding, window 1": Kind(lambda: SlidingRollbackCache(1, 2), 1, 2),
    "sliding, 4 bits": Kind(lambda: QuantizedRollbackCache(4, 32, 8, 4), 8, 4, ENDLESS),
    "sliding, 3 bits": Kind(lambda: QuantizedRollbackCache(3, 32, 5, 6), 5, 6),
    "growing": Kind(GrowingKVCache),
    "growing, mlx-lm's layout": Kind(KVCache),
    "growing, 6 bits": Kind(lambda: QuantizedGrowingCache(6, 32)),
    "ring before the wrap": Kind(lambda: RotatingKVCache(RING), RING, RING, RING - 1),
    "ring before the wrap, 8 bits": Kind(lambda: QuantizedRingCache(8, 32, RING), RING, RING, RING - 1),
    "batch": Kind(KVCache, together=PROMPTS),
    "batch, 2 bits": Kind(lambda: QuantizedGrowingCache(2, 32), together=PROMPTS),
    "batch of rings, 4 bits": Kind(lambda: QuantizedRingCache(4, 32, RING), RING, RING, RING - 1, PROMPTS),
}


class Walk:
    """A cache under test, a clean one, and the tokens since the prompts, as places in the pool."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.rng = kind, np.random.default_rng(7)
        shape = (len(kind.together) or 1, HEADS, POOL, DIM)
        queries, keys, values = (mx.array(self.rng.standard_normal(shape).astype(np.float32)) for _ in range(3))
        self.queries, self.pool = queries, (keys, values)
        self.cache = kind.new(self.pool)
        self.as_stored = stored(self.pool, self.cache)
        self.start()

    def start(self) -> None:
        self.clean = self.kind.new(self.pool)
        self.tokens: list[int] = []
        self.settled = self.furthest = 0  # the clean cache has so many of the tokens; the other had so many once

    def start_anew(self) -> None:
        """With everything taken back, where nothing is lost."""
        if hasattr(self.cache, "depth"):
            self.cache = self.kind.new(self.pool)
        else:
            self.take_back(len(self.tokens))
        self.start()

    def drawn(self, tokens: list[int]) -> Rows:
        keys, values = (mx.take(rows, mx.array(tokens), axis=2) for rows in self.pool)
        return keys, values

    def never_saw(self) -> Any:
        """A cache that was given no token that was taken back."""
        cache = copy.deepcopy(self.clean)
        if self.tokens[self.settled :]:
            cache.update_and_fetch(*self.drawn(self.tokens[self.settled :]))
        return cache

    def append(self, length: int, compare: bool) -> None:
        new = self.rng.integers(0, POOL, length).tolist()
        if compare:
            self.compare(new)
        else:
            self.cache.update_and_fetch(*self.drawn(new))
        self.tokens += new
        self.furthest = max(self.furthest, len(self.tokens))
        if compare:
            self.refuse_more()

    def compare(self, new: list[int]) -> None:
        """Append to both: the same state before, the same attention after."""
        queries, rows, results = mx.take(self.queries, mx.array(new), axis=2), self.drawn(new), []
        for cache in (self.cache, self.never_saw()):
            before = content(cache)
            results.append([before, attend(cache, queries, rows, self.kind.window)])
        if bits(results[0]) != bits(results[1]):
            assert_same(*results, f"state and attention after {len(self.tokens)} tokens, {len(new)} more")
        if self.rng.random() < 0.2:
            self.check(new, queries, results[0][1])

    def check(self, new: list[int], queries: mx.array, found: mx.array) -> None:
        """Each row against dense attention over what it was given: its prompt, and the tokens that are left."""
        for row, prompt in enumerate(self.kind.together or (0,)):
            places = mx.array([*range(prompt), *self.tokens, *new][-LONGEST:])
            keys, values = (mx.take(rows[row : row + 1], places, axis=2) for rows in self.as_stored)
            true = dense(queries[row : row + 1], (keys, values), self.kind.window)
            assert np.abs(np.array(found[row : row + 1]) - true).max() < 2e-5

    def refuse_more(self) -> None:
        """The rows of the last window have to be there still, or `trim` raises and changes nothing."""
        window, depth = self.kind.window or 0, self.kind.depth
        lost = self.furthest - (window - 1 + 2 * depth)
        if hasattr(self.cache, "depth") and lost > 0:
            most = len(self.tokens) - lost - window + 1
            with pytest.raises(StraightlineError, match=f"but only {most} can be taken back"):
                self.cache.trim(most + 1)

    def take_back(self, count: int) -> None:
        assert self.cache.is_trimmable() and self.cache.trim(count) == count
        del self.tokens[len(self.tokens) - count :]
        final = self.furthest - self.kind.depth
        if final > self.settled:
            self.clean.update_and_fetch(*self.drawn(self.tokens[self.settled : final]))
            self.settled = final

    @property
    def reach(self) -> int:
        """How many tokens can be taken back."""
        return min(len(self.tokens), self.kind.depth - (self.furthest - len(self.tokens)))


def content(cache: Any) -> list[Any]:
    """All that a cache holds. Of mlx-lm's layouts the rows of its tokens; what was taken back lies behind them."""
    held: list[Any] = []
    for part in getattr(cache, "parts", [cache]):
        if isinstance(part, (GrowingKVCache, SlidingRollbackCache)):
            held += part.state
        elif part.size():
            held += [*part.keys_and_values(), part.offset, getattr(part, "left_padding", None)]
    return held


def bits(tree: Any) -> list[Any]:
    """Shape, dtype and bytes of every array in it, and everything else."""
    leaves = [leaf for _, leaf in tree_flatten(tree)]
    mx.eval(leaves)
    return [(one.shape, one.dtype, np.asarray(one).tobytes()) if isinstance(one, mx.array) else one for one in leaves]


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches grow by few rows, often."""
    for one in (KVCache, RotatingKVCache, BatchKVCache, BatchRotatingKVCache, SlidingRollbackCache):
        monkeypatch.setattr(one, "step", 16)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_steps(name: str) -> None:
    """Single tokens, drafts, now and then a chunk wider than the window; back within the last append or beyond it."""
    kind, walk = KINDS[name], Walk(KINDS[name])
    prompt = max(kind.together, default=0)
    taken_back = one_after = count = 0
    for _ in range(STEPS):
        wide, single, compare = walk.rng.random(3) < (0.06, 0.3, 0.5)
        length = int(walk.rng.integers(1, 40 if wide else 2 if single else kind.depth + 2))
        if prompt + len(walk.tokens) + length > kind.longest:
            walk.start_anew()
            length = min(length, kind.longest - prompt)
        walk.append(length, bool(compare))
        one_after += bool(compare) and length == 1 and count > 0
        most = walk.reach if walk.rng.random() < 0.3 else min(walk.reach, length)
        count = int(walk.rng.integers(0, most + 1))
        walk.take_back(count)
        taken_back += count
    assert taken_back > STEPS / 4 and one_after > STEPS / 20
