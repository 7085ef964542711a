"""Does `decode` give the bits of `forward` here? Asked once a model on a GPU, before the first token goes through it.

On the CPU the tests have answered. The parts of `decode` are checked one by one where they are chosen (fused sites,
joined projections); this is the whole, on the model's own weights.
"""

import copy
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .arrays import difference, same_bits
from .evaluation import evaluate
from .in_place import Lease
from .kv.borrowed import give_all_back
from .taps import no_tap

PROMPT = 5
FILLED = 512  # rows, where no ring says how many
STEPS = 2
ONE = (1, 1)
IN_A_TRACE = "nothing can be compared inside mx.compile"
SEEN = methodcaller("keys_and_values")  # what attention reads
HELD = attrgetter("keys", "values")  # and rows behind it


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

    def differs() -> str:
        ours, theirs = make_caches()
        if not evaluate(list(map(SEEN, theirs))):
            return IN_A_TRACE
        for step in range(STEPS):
            ids = _ids(*shape, vocabulary, step)
            found, expected = decode(ids, ours), route.forward(weights, ids, theirs, no_tap)
            if not _same(found, expected):
                return _other_logits(found, expected, step)
            if other := _other_cache(ours, theirs):
                return f"at step {step} {other}"
        return ""

    return _asked_twice(differs)


def _asked_twice(differs: Callable[[], str]) -> str:
    """What differs, or why it fails. Whoever looks for the cause has to know whether it is so every time."""
    reason = _told(differs)
    if not reason or reason == IN_A_TRACE:
        return reason
    again = _told(differs)
    return reason if again == reason else f"{reason}; asked again, {again or 'all is equal'}"


def _told(differs: Callable[[], str]) -> str:
    try:
        return differs()
    except (RuntimeError, ValueError) as error:
        return f"it fails here: {error}"


def _other_logits(found: mx.array, expected: mx.array, step: int) -> str:
    return f"its logits differ from those of forward at step {step}: {difference(found, expected)}"


def _other_cache(ours: list[Any], theirs: list[Any], rows: Callable[[Any], Any] = SEEN) -> str:
    """The first cache that is another than forward's, and where. rows: its keys and values, arrays or packed parts."""
    for index, caches in enumerate(zip(ours, theirs, strict=True)):
        mine, other = map(tree_flatten, map(rows, caches))
        for (path, found), (_, expected) in zip(mine, other, strict=True):
            if not _same(found, expected):
                name = ("keys", "values")[int(path.partition(".")[0])]
                return f"it leaves another cache {index} than forward: {name} {difference(found, expected)}"
    return ""


def in_place_refused(
    weights: Any, route: Any, make_caches: Callable[[], list[Any]], vocabulary: int, by_token: bool = False
) -> str:
    """Why `decode` is not to write in place; empty if it gives forward's bits where rings wrap and others grow.

    by_token: over rings whose rows lie token by token.
    """

    def differs() -> str:
        ours, theirs = make_caches(), make_caches()
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
            expected = route.forward(weights, token, theirs, no_tap)
            if not _same(found, expected):
                return _other_logits(found, expected, step)
        give_all_back(ours)
        return _other_cache(ours, theirs, HELD)

    return _asked_twice(differs)


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


def _same(found: mx.array, expected: mx.array) -> bool:
    return same_bits(mx.contiguous(found), mx.contiguous(expected))
