"""Does `decode` give the bits of `forward` here? Asked once a model on a GPU, before the first token goes through it.

On the CPU the tests have answered. The parts of `decode` are checked one by one where they are chosen (fused sites,
joined projections); this is the whole, on the model's own weights.
"""

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .arrays import same_bits
from .evaluation import evaluate
from .in_place import Lease
from .kv.borrowed import give_all_back
from .taps import no_tap

PROMPT = 5
FILLED = 512  # rows, where no ring says how many
STEPS = 2
ONE = (1, 1)
IN_A_TRACE = "nothing can be compared inside mx.compile"


def on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def decode_refused(weights: Any, route: Any, make_caches: Callable[[], list[Any]], vocabulary: int) -> str:
    """Why `decode` is not to be used; empty if its logits and caches are those of `forward`, byte for byte."""

    def caches() -> tuple[list[Any], list[Any]]:
        ours = after_prompt(weights, route, make_caches(), 1, PROMPT, vocabulary)
        return ours, copy.deepcopy(ours)

    return _refused(weights, route, caches, ONE, _one_token(weights, route), vocabulary)


def batch_of_one_refused(weights: Any, route: Any, make_caches: Callable[[], list[Any]], vocabulary: int) -> str:
    """The same for `decode` over caches of one sequence, beside `forward` over batch caches of that sequence alone."""

    def caches() -> tuple[list[Any], list[Any]]:
        ours = after_prompt(weights, route, make_caches(), 1, PROMPT, vocabulary)
        return ours, [one.merge([one]) for one in ours]

    return _refused(weights, route, caches, ONE, _one_token(weights, route), vocabulary)


def block_refused(
    weights: Any,
    of_blocks: Any,
    route: Any,
    shape: tuple[int, int],
    padded: bool,
    make_caches: Callable[[], list[Any]],
    vocabulary: int,
) -> str:
    """The same for `decode` over blocks of this shape, [B, L]; padded: in batch caches, prompts unlike in length."""
    batch, _ = shape

    def caches() -> tuple[list[Any], list[Any]]:
        if not padded:
            ours = after_prompt(weights, route, make_caches(), batch, PROMPT, vocabulary)
            return ours, copy.deepcopy(ours)
        alone = [after_prompt(weights, route, make_caches(), 1, PROMPT + row, vocabulary) for row in range(batch)]
        ours, theirs = ([one[0].merge(list(one)) for one in zip(*alone, strict=True)] for _ in range(2))
        return ours, theirs

    def decode(ids: mx.array, caches: list[Any]) -> mx.array:
        found: mx.array = route.decode(of_blocks, route.blocks.begin(shape, caches), ids, caches, no_tap)
        return found

    return _refused(weights, route, caches, shape, decode, vocabulary)


def after_prompt(weights: Any, route: Any, caches: list[Any], batch: int, length: int, vocabulary: int) -> list[Any]:
    """The caches after a prompt through `forward`, another for each row."""
    route.forward(weights, _ids(batch, length, vocabulary), caches, no_tap)
    return caches


def _ids(batch: int, length: int, vocabulary: int, start: int = 0) -> mx.array:
    ids: mx.array = (mx.arange(start, start + length)[None] + mx.arange(batch)[:, None]) % vocabulary
    return ids


def _one_token(weights: Any, route: Any) -> Callable[[mx.array, list[Any]], mx.array]:
    return lambda ids, caches: route.decode(weights.single, route.sites, ids, caches, no_tap)


def _refused(
    weights: Any,
    route: Any,
    make_caches: Callable[[], tuple[list[Any], list[Any]]],
    shape: tuple[int, int],
    decode: Callable[[mx.array, list[Any]], mx.array],
    vocabulary: int,
) -> str:
    """Ids of `shape` through `decode` into ours, and through `forward` into the twins that come with them."""
    try:
        ours, theirs = make_caches()
        if not evaluate([_arrays(cache) for cache in theirs]):
            return IN_A_TRACE
        for step in range(STEPS):
            ids = _ids(*shape, vocabulary, step)
            if not _same(decode(ids, ours), route.forward(weights, ids, theirs, no_tap)):
                return f"its logits differ from those of forward at step {step}"
            for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                if not all(map(_same, _arrays(mine), _arrays(other))):
                    return f"it leaves another cache {index} than forward at step {step}"
    except (RuntimeError, ValueError) as error:
        return f"it fails here: {error}"
    return ""


def in_place_refused(
    weights: Any, route: Any, make_caches: Callable[[], list[Any]], vocabulary: int, by_token: bool = False
) -> str:
    """Why `decode` is not to write in place; empty if it gives forward's bits where rings wrap and others grow.

    by_token: over rings whose rows lie token by token.
    """
    ours, theirs = make_caches(), make_caches()
    try:
        for caches in (ours, theirs):
            if not evaluate(route.forward(weights, mx.array([[1 % vocabulary]]), caches, no_tap)):
                return IN_A_TRACE
            fill(caches, by_token)
        how = [(by_token, by_token) if hasattr(cache, "max_size") else (False, False) for cache in ours]
        lease = Lease(ours, route.guard, by_token=how)
        for step in range(STEPS + 1):
            token = mx.array([[step % vocabulary]])
            slots, calls = lease.begin(route.in_place)
            found = route.decode(weights.single, calls, token, slots, no_tap)
            lease.end(found)
            if not _same(found, route.forward(weights, token, theirs, no_tap)):
                return f"its logits differ from those of forward at step {step}"
        give_all_back(ours)
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if not all(map(_same, [mine.keys, mine.values], [other.keys, other.values])):
                return f"it leaves another cache {index} than forward"
    except (RuntimeError, ValueError) as error:
        return f"it fails here: {error}"
    return ""


def fill(caches: list[Any], by_token: bool = False) -> None:
    """Random rows up to the last before the first ring wraps, in caches that have seen one token.

    by_token: those of rings token by token.
    """
    rows = min((cache.max_size for cache in caches if hasattr(cache, "max_size")), default=FILLED)
    for index, cache in enumerate(caches):
        _fill(cache, rows, index, by_token and hasattr(cache, "max_size"))


def _fill(cache: Any, rows: int, seed: int, by_token: bool) -> None:
    """Random rows, all but the last of `rows`, in a cache that has seen one token."""
    for name, key in zip(("keys", "values"), mx.random.split(mx.random.key(seed)), strict=True):
        one = getattr(cache, name)
        _, heads, _, size = one.shape
        shape = (1, rows, heads, size) if by_token else (1, heads, rows, size)
        filled = mx.random.normal(shape, one.dtype, key=key)
        setattr(cache, name, filled.swapaxes(1, 2) if by_token else filled)
    cache.offset = rows - 1
    if hasattr(cache, "_idx"):
        cache._idx = rows - 1


def _arrays(cache: Any) -> list[mx.array]:
    """What attention reads: keys and values, each one array or the parts of a packed one."""
    return [array for _, array in tree_flatten(cache.keys_and_values())]


def _same(found: mx.array, expected: mx.array) -> bool:
    return same_bits(mx.contiguous(found), mx.contiguous(expected))
