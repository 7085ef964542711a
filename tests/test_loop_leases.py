"""The loop over caches whose rows are leased while single tokens are decoded (runtime/in_place)."""

from contextlib import closing
from functools import cache
from itertools import islice

import mlx.core as mx
import pytest
from comparing import assert_same
from mlx_lm.sample_utils import make_sampler
from pairs import Pair
from test_in_place import leasing
from test_loop import PROMPT, first, key, ours, same_caches, theirs

from straightline.runtime.decoding import loop
from straightline.runtime.in_place import lease_of


@cache
def models(shape: str = "e4b", window: int = 8) -> Pair:
    return leasing(shape, window)


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


@pytest.mark.parametrize("count", [7, 8, 22])
def test_several_tokens_before_a_read(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rings of 24 are not full, what a lease computed too early can be taken back. Two turns."""
    both, sizes, plain = models("12b", 24), [], loop._read

    def read(ids: mx.array) -> list[int]:
        sizes.append(ids.size)
        return plain(ids)

    monkeypatch.setattr(loop, "_read", read)
    caches = both.plain.make_cache(), both.model.make_cache()
    for prompt in (PROMPT, [7, 4]):
        expected = first(count, theirs(both.plain, prompt, prompt_cache=caches[0], max_tokens=-1))
        with closing(ours(both.model, prompt, prompt_cache=caches[1], max_tokens=-1)) as tokens:
            found = list(islice(tokens, count))
            assert lease_of(caches[1]) is not None
        assert_same(found, expected, "tokens")
        same_caches(caches[1], caches[0])
    assert max(sizes) == (8 if count > 7 else 4)
