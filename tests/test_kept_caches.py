"""Prompt caches that `straightline serve` keeps between requests: mlx-lm's loops can go on from what it hands out."""

from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import file_of
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import trim_prompt_cache

from straightline.runtime import make_cache, specialize
from straightline.runtime.commands.speculation import KeptCaches

KEY = "toy"
TOKENS = toys.tokens(1, 30)[0].tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return specialize(toys.build(toys.E6), file_of(toys.E6), strict=True)


def kept(model: Any, seen: int, taken_back: int) -> KeptCaches:
    """Those of one prompt, both models' as speculation has them, under the tokens that are left."""
    caches = [one for _ in range(2) for one in make_cache(model, rollback=True, depth=4, every_layer=True)]
    for half in (caches[:6], caches[6:]):
        mx.eval(model(mx.array([TOKENS[:seen]]), cache=half))
        trim_prompt_cache([one for one in half if hasattr(one, "offset")], taken_back)
    found = KeptCaches(4)
    found.insert_cache(KEY, TOKENS[: seen - taken_back], caches)
    return found


@pytest.mark.parametrize(("seen", "taken_back"), [(6, 0), (6, 4), (25, 0), (25, 6), (25, 7), (25, 8)])
@pytest.mark.parametrize("more", [-1, 0, 3])
def test_speculation_goes_on_from_what_is_kept(model: Any, seen: int, taken_back: int, more: int) -> None:
    """A shorter prompt, the same one and a longer one, up to where all that can be taken back has been."""
    wanted = TOKENS[: seen - taken_back + more]
    caches, rest = kept(model, seen, taken_back).fetch_nearest_cache(KEY, wanted)
    left = 8 - taken_back - {-1: 2, 0: 1, 3: 0}[more]  # a depth of 4 keeps 8 here
    if seen == 25 and left <= 0:
        assert (caches, rest) == (None, wanted)
        caches = [one for _ in range(2) for one in make_cache(model, rollback=True, depth=4, every_layer=True)]
    else:
        assert len(rest) == max(more, 1)
    steps = speculative_generate_step(
        mx.array(rest), model, model, num_draft_tokens=2, max_tokens=6, prompt_cache=caches
    )
    greedy = generate_step(mx.array(wanted), model, max_tokens=6)
    assert [token for token, *_ in steps] == [token for token, _ in greedy]
