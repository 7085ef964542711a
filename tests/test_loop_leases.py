"""The loop over caches whose rows are leased while single tokens are decoded (runtime/in_place)."""

from functools import cache

import pytest
from comparing import assert_same
from mlx_lm.sample_utils import make_sampler
from pairs import Pair
from test_in_place import leasing
from test_loop import PROMPT, first, key, ours, same_caches, theirs

from straightline.runtime.in_place import lease_of


@cache
def models(shape: str = "e4b") -> Pair:
    return leasing(shape)


@pytest.mark.parametrize("shape", ["e4b", "12b"])
def test_caches_of_its_own(shape: str) -> None:
    both = models(shape)
    assert_same(list(ours(both.model, max_tokens=24)), list(theirs(both.plain, max_tokens=24)), "tokens")


@pytest.mark.parametrize("count", [1, 3, 4, 5, 6, 7, 8, 13])
def test_caches_of_the_callers(count: int) -> None:
    """Stopped before, while and after the lease begins, over a window of 8; and then a second turn."""
    both = models()
    caches = both.plain.make_cache(), both.model.make_cache()
    leased = []
    for prompt in (PROMPT, [7, 4]):
        sampler = make_sampler(temp=1.0)
        expected = first(count, theirs(both.plain, prompt, prompt_cache=caches[0], max_tokens=-1, sampler=sampler))
        after = key()
        found = first(count, ours(both.model, prompt, prompt_cache=caches[1], max_tokens=-1, sampler=sampler))
        assert_same(found, expected, "tokens")
        assert_same(key(), after, "random key")
        leased.append(lease_of(caches[1]) is not None)
        same_caches(caches[1], caches[0])
        assert lease_of(caches[1]) is None
    assert leased == [count >= 3, True]
