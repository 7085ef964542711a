"""B35, B37, B66: the window and its masks: chunks on either side of it, its exact edge, blocks across the wrap."""

from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import (
    BFLOAT16,
    FLOAT32,
    FOUR_BIT,
    SCHEDULES,
    Case,
    Recorded,
    Trio,
    assert_close,
    assert_same,
    run,
    same_bits,
)
from mlx_lm.models.cache import KVCache, RotatingKVCache

from straightline.runtime import HiddenTap

SHAPED = pytest.mark.parametrize("config", [toys.D6, toys.M6, toys.E6], ids=["D6", "M6", "E6"])


@SHAPED
@pytest.mark.parametrize("lengths", [(20,), (7, 9, 4), (1,) * 20, (8, 8, 4), (3, 12, 5), (19, 1)], ids=str)
def test_chunks_equal_a_full_recompute(config: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """B35: every schedule gives what one forward over the whole sequence with an explicit mask gives.

    Bits are compared with mlx-lm at the same schedule (in `run`); across schedules matmul shapes differ and round
    differently, so there the tokens chosen must be equal and the logits close.
    """
    case = Case(config)
    logits = mx.concatenate(run(case, lengths), axis=1)
    whole = case.plain(case.tokens(1, 20))
    assert_close(logits, whole, "logits")
    assert mx.array_equal(logits.argmax(-1), whole.argmax(-1)).item()


@SHAPED
def test_masks_cover_the_keys(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """B35: no mask is longer or shorter than the keys it is for; kinds of layer see their own number of keys."""
    case = Case(config)
    caches = case.model.make_cache()
    recorded = Recorded(mx.fast.scaled_dot_product_attention)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    seen = 0
    for length in (3, 1, 9, 1, 2, 8, 1, 1):
        case.model(case.tokens(1, length), cache=caches)
        calls = recorded.take()
        assert len(calls) == case.layers
        sliding_keys = min(seen, 7) + length
        for (queries, keys, values), keywords, _ in calls:
            mask = keywords["mask"]
            assert queries.shape[2] == length
            assert keys.shape[2] == values.shape[2]
            assert keys.shape[2] in (seen + length, sliding_keys)
            if isinstance(mask, mx.array):
                assert mask.shape[-2:] == (length, keys.shape[2])
            else:
                assert mask in (None, "causal")
        for (_, keys, _), layer_type in zip((call[0] for call in calls), config["layer_types"], strict=True):
            assert keys.shape[2] == (seen + length if layer_type == toys.FULL else sliding_keys)
        seen += length


def rows_after(case: Case, ids: mx.array, lengths: tuple[int, ...]) -> mx.array:
    """What leaves layer 0, a sliding layer, at the last position."""
    tap = HiddenTap([0], position=-1)
    caches = case.model.make_cache()
    for length in lengths:
        case.model(ids[:, :length], cache=caches, tap=tap)
        ids = ids[:, length:]
    assert case.model.dispatch.counts["monolith"] == 0
    return tap.captured[0]


@pytest.mark.parametrize("last", [8, 9, 15, 16, 17, 23])
@pytest.mark.parametrize("how", ["prefill", "decode", "chunk", "block"])
def test_the_window_edge(last: int, how: str) -> None:
    """B37: at window 8 the token at distance 7 still matters, the one at distance 8 does not, bit by bit.

    One layer, so that nothing reaches further back through the layers before it.
    """
    case = Case(toys.config(layer_types=[toys.SLIDING], num_hidden_layers=1))
    lengths = {
        "prefill": (last + 1,),
        "decode": (1,) * (last + 1),
        "chunk": (4, last - 3),
        "block": (last - 2, 3),
    }[how]
    ids = case.tokens(1, last + 1)
    rows = rows_after(case, ids, lengths)

    def perturbed(distance: int) -> mx.array:
        other = mx.array(ids)
        other[0, last - distance] = (other[0, last - distance] + 1) % 97
        return rows_after(case, other, lengths)

    for distance in range(8):
        assert not same_bits(perturbed(distance), rows), f"distance {distance} does not matter"
    for distance in range(8, last + 1):
        assert same_bits(perturbed(distance), rows), f"distance {distance} matters"


@SHAPED
@pytest.mark.parametrize("start", [2, 6, 7, 8, 11, 13], ids=lambda start: f"at{start}")
def test_block_equals_steps(config: dict[str, Any], start: int) -> None:
    """B66: a block of 4 against 4 single steps, before, across and after the wrap: logits and every cache tensor.

    Each is bit-equal to mlx-lm; one against the other is close, since a matmul of 4 rows rounds unlike one of 1 row.
    """
    case = Case(config)
    ids = case.tokens(1, start + 4)
    block, steps = Trio(case), Trio(case)
    block(ids[:, :start])
    steps(ids[:, :start])
    blocked = block(ids[:, start:])
    stepped = mx.concatenate([steps(ids[:, start + i : start + i + 1]) for i in range(4)], axis=1)
    assert_close(blocked, stepped, "logits")
    assert mx.array_equal(blocked.argmax(-1), stepped.argmax(-1)).item()
    for one, other in zip(block.generated, steps.generated, strict=True):
        assert one.offset == other.offset == start + 4
        for found, expected in zip(in_order(one), in_order(other), strict=True):
            assert_close(found, expected, "cache")


def in_order(cache: Any) -> list[mx.array]:
    """Keys and values that later tokens can see, oldest first."""
    if isinstance(cache, RotatingKVCache):
        kept = min(cache.offset, cache.max_size - 1)
        return [cache._temporal_order(one)[..., -kept:, :] for one in (cache.keys, cache.values)]
    return [one[..., : cache.offset, :] for one in (cache.keys, cache.values)]


@pytest.mark.parametrize("length", range(2, 9))
@pytest.mark.parametrize("start", [1, 5, 8, 12])
def test_blocks_of_every_width(length: int, start: int) -> None:
    """Blocks of 2 to 8 before, across and after the wrap, then a step: bits."""
    run(Case(toys.E6, dtype=BFLOAT16), (start, length, 1))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 12, 64])
@pytest.mark.parametrize("schedule", ["chunk over the window", "prompt then steps", "blocks past the window"])
def test_other_windows(window: int, schedule: str) -> None:
    run(Case(toys.config(**toys.SHARING, sliding_window=window), dtype=FLOAT32), SCHEDULES[schedule])


@pytest.mark.parametrize("size", [3, 8, 20])
def test_rings_of_another_size(size: int) -> None:
    """A caller's rings may be smaller or larger than the window, or keep first tokens: mlx-lm's numbers."""
    for keep in (0, 2):
        case = Case(toys.D6, dtype=BFLOAT16, quantize=FOUR_BIT)
        make = lambda keep=keep: [  # noqa: E731
            KVCache() if kind == toys.FULL else RotatingKVCache(size, keep=keep) for kind in toys.D6["layer_types"]
        ]
        trio = Trio(case, make)
        ids = case.tokens(1, 16)
        for start, stop in ((0, 2), (2, 3), (3, 12), (12, 13), (13, 14), (14, 16)):
            trio(ids[:, start:stop])


def test_trimmed_caches() -> None:
    """Caches trimmed by the caller, as for rejected drafts, go on from where they are."""
    case = Case(toys.E6)
    trio = Trio(case)
    ids = case.tokens(1, 12)
    trio(ids[:, :6])
    trio.each(lambda cache: cache.trim(3))
    trio(ids[:, 6:8])
    assert_same([cache.offset for cache in trio.generated], [5] * 3, "offsets")
    trio(ids[:, 8:9])
    trio(ids[:, 9:])
