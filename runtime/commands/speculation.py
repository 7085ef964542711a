"""mlx_lm.server with a draft model: caches that it can split between both models, and keep for the next request.

Of mlx-lm 0.32.2, three things go wrong there. It gives the target the first len(layers) caches, but layers that share
K/V have none; it keeps caches under more tokens than they have seen; it takes back more tokens than rings can give. And
with or without a draft model, it ends at a prompt that its kept caches have seen as a whole.
"""

from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache

from ..errors import StraightlineError
from ..kv import QuantizedRollbackCache, SlidingRollbackCache, make_cache
from .loader import rolls_back


def every_layer(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """As mlx-lm's, with one cache for each layer where the model takes part in speculation."""
    if rolls_back(model):
        return make_cache(model, every_layer=True)
    caches: list[Any] = make_prompt_cache(model, max_kv_size)
    return caches


class KeptCaches(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's, but a prompt that is there as a whole leaves a token to go on from, and is else computed anew.

    Caches of speculation are kept under the tokens that all of them have seen.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> tuple[list[Any] | None, list[Any]]:
        try:
            caches, rest = super().fetch_nearest_cache(model, tokens)
            if caches is not None and not rest:
                _take_back(caches, 1)  # there has to be a token to go on from, or mlx-lm's thread ends
                rest = tokens[-1:]
        except StraightlineError:  # the nearest would have to take back more than it can
            return None, tokens
        if caches is not None and _speculative(caches) and not can_trim_prompt_cache(caches):
            return None, tokens  # all that can be taken back is: mlx-lm's speculation refuses these
        return caches, rest

    def insert_cache(self, model: Any, tokens: list[Any], prompt_cache: list[Any], **named: Any) -> None:
        if _speculative(prompt_cache):
            counted = [cache for cache in prompt_cache if hasattr(cache, "offset")]
            seen = min(cache.offset for cache in counted)
            try:
                for cache in counted:
                    _take_back([cache], cache.offset - seen)
            except StraightlineError:
                return
            tokens = tokens[:seen]
        super().insert_cache(model, tokens, prompt_cache, **named)


def _speculative(caches: list[Any]) -> bool:
    return any(isinstance(cache, (SlidingRollbackCache, QuantizedRollbackCache)) for cache in caches)


def _take_back(caches: list[Any], count: int) -> None:
    """Raises StraightlineError where mlx-lm's own ring would go on with wrong rows; nobody is shown it."""
    for cache in caches:
        if count and not cache.is_trimmable():
            raise StraightlineError(type(cache).__name__)
        cache.trim(count)
