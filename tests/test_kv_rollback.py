"""B59, B66: tokens appended and taken back, every width after every rejection, fed straight with keys and values.

Each append is compared with dense attention over the true history, and, bit for bit, with a twin that never saw any
rejected token; each state with the twin's.
"""

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparing import assert_same
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_reference import DIM, HEADS, attend, cut, dense, join, random_rows, stored
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from straightline.runtime import StraightlineError
from straightline.runtime.kv import (
    GrowingKVCache,
    QuantizedGrowingCache,
    QuantizedRollbackCache,
    SlidingRollbackCache,
)

WINDOW, DEPTH = 8, 4
CLASSES: dict[str, tuple[Callable[[], Any], int | None]] = {
    "sliding": (lambda: SlidingRollbackCache(WINDOW, DEPTH), WINDOW),
    "sliding, depth 1": (lambda: SlidingRollbackCache(WINDOW, 1), WINDOW),
    "sliding, deeper than the window": (lambda: SlidingRollbackCache(3, 16), 3),
    "sliding, 4 bits": (lambda: QuantizedRollbackCache(4, 32, WINDOW, DEPTH), WINDOW),
    "sliding, 3 bits": (lambda: QuantizedRollbackCache(3, 32, WINDOW, DEPTH), WINDOW),
    "growing": (GrowingKVCache, None),
    "growing, 8 bits": (lambda: QuantizedGrowingCache(8, 32), None),
    "growing, 6 bits": (lambda: QuantizedGrowingCache(6, 32), None),
}


class History:
    """A cache under test, its twin, and every accepted token."""

    def __init__(self, name: str) -> None:
        make, self.window = CLASSES[name]
        self.cache, self.twin = make(), make()
        self.depth = getattr(self.cache, "depth", 16)
        self.rng = np.random.default_rng(0)
        self.tokens: list[Any] = []

    @property
    def length(self) -> int:
        return sum(rows[0].shape[2] for rows in self.tokens)

    def append(self, length: int, reject: int) -> None:
        """Append `length` tokens at once, check what they see, take `reject` of them back."""
        rows = random_rows(self.rng, length)
        queries = mx.array(self.rng.standard_normal((1, 2 * HEADS, length, DIM)).astype(np.float32))
        clean = copy.copy(self.twin)
        found = attend(self.cache, queries, rows, self.window)
        assert_same(found, attend(clean, queries, rows, self.window), "a cache that saw no rejected token")
        true = dense(queries, join([*self.tokens, stored(rows, self.cache)]), self.window)
        assert np.abs(np.array(found) - true).max() < 2e-5
        assert self.cache.trim(reject) == reject
        if length > reject:
            kept = cut(rows, 0, length - reject)
            mx.eval(self.twin.update_and_fetch(*kept))
            self.tokens.append(stored(kept, self.cache))

    def check(self) -> None:
        """The state is the twin's, bit for bit."""
        assert_same(self.cache.state, self.twin.state, "state")
        assert self.cache.offset == self.twin.offset
        assert self.cache.size() == self.twin.size()
        assert self.cache.empty() == self.twin.empty()
        assert self.cache.is_trimmable()


@pytest.mark.parametrize("name", [name for name in CLASSES if name.startswith("sliding")])
@pytest.mark.parametrize("filled", [6, 7, 8, 15, 40])
def test_every_width_after_every_rejection(name: str, filled: int) -> None:
    """Before, across and after the wrap: after r of k rejected, each next width sees what the clean cache sees."""
    depth = CLASSES[name][0]().depth
    for drafted in {1, min(4, depth)}:
        for rejected in range(drafted + 1):
            for width in (1, 2, 3, depth + 1, depth + 2):
                history = History(name)
                history.append(filled, 0)
                history.append(drafted, rejected)
                history.check()
                history.append(width, 0)


class Schedules(RuleBasedStateMachine):
    """Whatever a user may do to a cache between appends, in any order."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.history = History(self.name)

    @rule(length=st.integers(1, 12), data=st.data())
    def append_and_reject(self, length: int, data: Any) -> None:
        self.history.append(length, data.draw(st.integers(0, min(length, self.history.depth))))

    @rule(length=st.integers(13, 60))
    def append_a_chunk(self, length: int) -> None:
        self.history.append(length, 0)

    @rule()
    def copy(self) -> None:
        """A copy goes on; what happens to it does not reach the original."""
        history = self.history
        original, before = history.cache, list(map(_frozen, [history.cache.state]))
        history.cache = copy.copy(original)
        history.append(2, 1)
        assert_same([_frozen(original.state)], before, "the original")

    @rule()
    def deepcopy(self) -> None:
        self.history.cache = copy.deepcopy(self.history.cache)

    @precondition(lambda self: self.history.length > 0)
    @rule()
    def through_the_state(self) -> None:
        """Both, since a cache from a state has no more rows to go back to than the state has."""
        history = self.history
        history.cache = type(history.cache).from_state(history.cache.state)
        history.twin = type(history.twin).from_state(history.twin.state)

    @invariant()
    def same_state(self) -> None:
        self.history.check()


def _frozen(state: Any) -> Any:
    if isinstance(state, (list, tuple)):
        return [_frozen(one) for one in state]
    return np.array(state).tobytes() if isinstance(state, mx.array) else state


@pytest.mark.parametrize("name", CLASSES)
def test_state_machine(name: str) -> None:
    machine = type("Schedules", (Schedules,), {"name": name})
    case = machine.TestCase
    case.settings = settings(
        max_examples=12,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()


def test_too_deep_is_refused_with_nothing_changed() -> None:
    """`trim` beyond what is there raises; up to twice the depth in all, results stay exact."""
    for cache in (SlidingRollbackCache(WINDOW, DEPTH), QuantizedRollbackCache(4, 32, WINDOW, DEPTH)):
        history = History("sliding")
        history.cache = cache
        cache.update_and_fetch(*random_rows(history.rng, 50))
        before = _frozen(cache.state)
        with pytest.raises(StraightlineError) as refused:
            cache.trim(9)
        assert str(refused.value) == (
            "SlidingRollbackCache: trim(9) after 50 tokens, but only 8 can be taken back; "
            "make the cache with a depth of 9 or more in place of 4"
        )
        assert _frozen(cache.state) == before
        assert cache.trim(4) == 4 and cache.trim(4) == 4
        assert not cache.is_trimmable()
        assert trim_prompt_cache([cache], 1) == 0
        mx.eval(cache.update_and_fetch(*random_rows(history.rng, 1)))
        assert cache.is_trimmable() and cache.trim(1) == 1


@pytest.mark.parametrize("filled", [12, 14, 15, 16, 40])
def test_a_cache_from_a_state_goes_back_by_its_depth_and_no_further(filled: int) -> None:
    """Its older rows are gone, wherever the slots of the first tokens are."""
    history = History("sliding")
    rows = random_rows(history.rng, filled)
    history.cache.update_and_fetch(*rows)
    history.cache = SlidingRollbackCache.from_state(history.cache.state)
    assert history.cache.trimmable == DEPTH
    with pytest.raises(StraightlineError, match=f"after {filled} tokens, but only 4 can be taken back"):
        history.cache.trim(DEPTH + 1)
    assert history.cache.trim(DEPTH) == DEPTH
    history.tokens = [cut(rows, 0, filled - DEPTH)]
    history.twin.update_and_fetch(*history.tokens[0])
    for width in (1, 3, 1, 5, 2):
        history.append(width, 1)


@pytest.mark.parametrize("name", CLASSES)
def test_everything_can_be_taken_back_before_the_wrap(name: str) -> None:
    """A cache that is trimmed to nothing is an empty one; more than there is trims what there is, as in mlx-lm."""
    make = CLASSES[name][0]
    cache = make()
    assert cache.empty() and cache.nbytes == 0 and can_trim_prompt_cache([cache])
    mx.eval(cache.update_and_fetch(*random_rows(np.random.default_rng(0), 7)))
    assert trim_prompt_cache([cache], 100) == 7
    assert_same(cache.state, make().state, "state")
    assert cache.empty() and cache.offset == 0


def test_a_smaller_window_is_masked_and_a_larger_refused() -> None:
    history = History("sliding")
    for length in (3, 1, 1, 9, 1, 2, 40, 1):
        rows = random_rows(history.rng, length)
        queries = mx.array(history.rng.standard_normal((1, HEADS, length, DIM)).astype(np.float32))
        history.tokens.append(rows)
        found = attend(history.cache, queries, rows, 5)
        assert np.abs(np.array(found) - dense(queries, join(history.tokens), 5)).max() < 2e-5
    with pytest.raises(StraightlineError, match="make_mask for a window of 9, but the cache holds 8"):
        history.cache.make_mask(1, window_size=9)


@pytest.mark.parametrize("length", [1, 3, 30])
def test_return_array(length: int) -> None:
    """`return_array` gives an array that says the same as None or "causal"."""
    rng = np.random.default_rng(0)
    for filled in (0, 2, 30):
        cache = SlidingRollbackCache(40, DEPTH)
        if filled:
            cache.update_and_fetch(*random_rows(rng, filled))
        mask = cache.make_mask(length, return_array=True, window_size=40)
        rows = cache.update_and_fetch(*random_rows(rng, length))[0].shape[2]
        assert mask.shape == (length, rows)
