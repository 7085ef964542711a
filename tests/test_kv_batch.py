"""B46, B51, B52: quantized caches in batches, each row equal to its solo run; rollback caches refused by name."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import toys
from comparing import assert_same, file_of
from kv_reference import attend, random_rows
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as mlx_lm_cache

from straightline.runtime import StraightlineError, make_cache, specialize
from straightline.runtime.kv import (
    KVCache,
    QuantizedGrowingCache,
    QuantizedRingCache,
    RotatingKVCache,
    SlidingRollbackCache,
)
from straightline.runtime.kv.device import packing

WINDOW = 8
CPU = mx.default_stream(mx.cpu)
MIXED = [{"layer_idx": 0, "bits": 4, "group_size": 32}, {"layer_idx": 2, "bits": 8, "group_size": 64}]
EIGHT = [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(3)]


@pytest.fixture(scope="module", params=["D6", "E6", "M6"])
def model(request: pytest.FixtureRequest) -> Any:
    config = {"D6": toys.D6, "E6": toys.E6, "M6": toys.M6}[request.param]
    return specialize(toys.build(config), file_of(config))


def make(layout: str) -> Any:
    return QuantizedRingCache(4, 32, WINDOW) if layout == "ring" else QuantizedGrowingCache(4, 32)


def window_of(layout: str) -> int | None:
    return WINDOW if layout == "ring" else None


@pytest.mark.parametrize("fills", [(5, 8, 20), (0, 3, 9), (7, 7, 7), (1, 30, 0)], ids=str)
@pytest.mark.parametrize("layout", ["ring", "growing"])
def test_rows_are_their_solo_runs(layout: str, fills: tuple[int, ...]) -> None:
    """B51: merge unequal fills at window 8, decode 4, drop a row, extend by another batch, decode on, take rows out."""
    rng, window = np.random.default_rng(0), window_of(layout)
    solo = [make(layout) for _ in range(4)]
    for cache, fill in zip(solo, (*fills, 11), strict=True):
        if fill:
            cache.update_and_fetch(*random_rows(rng, fill))
    copies = [type(one).from_state(one.state) for one in solo]
    batch, rows = solo[0].merge(copies[:3]), [0, 1, 2]
    for step in range(12):
        if step == 4:
            batch.filter([0, 2])
            rows = [0, 2]
        if step == 8:
            batch.extend(copies[3].merge(copies[3:]))
            rows = [0, 2, 3]
        queries, parts = zip(*((random_rows(rng, 1)[0], random_rows(rng, 1)) for _ in rows), strict=True)
        joined = tuple(mx.concatenate([part[side] for part in parts], axis=0) for side in (0, 1))
        found = attend(batch, mx.concatenate(list(queries), axis=0), joined, window)  # type: ignore[arg-type]
        for place, row in enumerate(rows):
            expected = attend(solo[row], queries[place], parts[place], window)
            assert mx.allclose(found[place : place + 1], expected, rtol=1e-5, atol=1e-6).item(), (step, row)
    assert (packing(batch), batch.nbytes > 0, batch.empty()) == ((4, 32), True, False)
    for place, row in enumerate(rows):
        taken = batch.extract(place)
        assert type(taken) is type(solo[row]) and taken.offset == solo[row].offset
        queries_, one = random_rows(rng, 3)[0], random_rows(rng, 3)
        assert mx.allclose(attend(taken, queries_, one, window), attend(solo[row], queries_, one, window), atol=1e-6)


@pytest.mark.parametrize("fills", [(20, 0), (20, 3), (0, 0, 9)], ids=str)
@pytest.mark.parametrize("layout", ["ring", "growing"])
def test_several_tokens_for_a_short_row_beside_one_that_has_wrapped(layout: str, fills: tuple[int, ...]) -> None:
    """mlx-lm's own batch ring hides the short row's tokens from it."""
    rng, window = np.random.default_rng(3), window_of(layout)
    solo = [make(layout) for _ in fills]
    for cache, fill in zip(solo, fills, strict=True):
        if fill:
            cache.update_and_fetch(*random_rows(rng, fill))
    batch = solo[0].merge(solo)
    for length in (1, 4, 1, 2, 1, 1, 1, 3):
        queries, parts = zip(*((random_rows(rng, length)[0], random_rows(rng, length)) for _ in fills), strict=True)
        joined = tuple(mx.concatenate([part[side] for part in parts], axis=0) for side in (0, 1))
        found = attend(batch, mx.concatenate(list(queries), axis=0), joined, window)  # type: ignore[arg-type]
        for row, cache in enumerate(solo):
            expected = attend(cache, queries[row], parts[row], window)
            assert mx.allclose(found[row : row + 1], expected, rtol=1e-5, atol=1e-6).item(), (length, row)


@pytest.mark.parametrize("layout", ["ring", "growing"])
def test_merging_empty_ones_and_padding(layout: str) -> None:
    """B46: prompts of 5 and 2 in one padded batch, padded on either side."""
    window = window_of(layout)
    for side in ("left", "right"):
        rng = np.random.default_rng(1)
        solo = [make(layout), make(layout)]
        prompts = [random_rows(rng, 5), random_rows(rng, 2)]
        asked = [random_rows(rng, 5)[0], random_rows(rng, 2)[0]]
        batch = solo[0].merge([make(layout), make(layout)])
        if side == "left":
            batch.prepare(left_padding=[0, 3])
        else:
            batch.prepare(lengths=[5, 2], right_padding=[0, 3])
        pad = [(0, 0), (0, 0), (3, 0) if side == "left" else (0, 3), (0, 0)]
        joined = tuple(mx.concatenate([prompts[0][i], mx.pad(prompts[1][i], pad)], axis=0) for i in (0, 1))
        found = attend(batch, mx.concatenate([asked[0], mx.pad(asked[1], pad)], axis=0), joined, window)  # type: ignore[arg-type]
        batch.finalize()
        expected = [attend(solo[row], asked[row], prompts[row], window) for row in (0, 1)]
        real = found[1:, :, 3:] if side == "left" else found[1:, :, :2]
        assert mx.allclose(found[:1], expected[0], atol=1e-6) and mx.allclose(real, expected[1], atol=1e-6)
        assert batch.offset.tolist() == [5, 2]
        for _ in range(10):
            parts = [random_rows(rng, 1) for _ in range(2)]
            queries = random_rows(rng, 1)[0]
            step = tuple(mx.concatenate([parts[0][i], parts[1][i]], axis=0) for i in (0, 1))
            found = attend(batch, mx.concatenate([queries, queries], axis=0), step, window)  # type: ignore[arg-type]
            for row in (0, 1):
                expected_row = attend(solo[row], queries, parts[row], window)
                assert mx.allclose(found[row : row + 1], expected_row, rtol=1e-5, atol=1e-6).item()


@pytest.mark.parametrize("entries", [MIXED, EIGHT], ids=["mixed", "8 bits"])
def test_through_a_model(model: Any, entries: Any) -> None:
    """Rows of 5, 8 and 20 tokens, merged, then 6 steps: each row's logits are its solo run's."""
    solo = [make_cache(model, entries) for _ in range(3)]
    for row, length in enumerate((5, 8, 20)):
        mx.eval(model(toys.tokens(1, length, seed=row), cache=solo[row]))
    batch = [one[0].merge(list(one)) for one in zip(*solo, strict=True)]
    for step in range(6):
        ids = toys.tokens(3, 1, seed=50 + step)
        found = model(ids, cache=batch)
        for row in range(3):
            expected = model(ids[row : row + 1], cache=solo[row])
            assert mx.allclose(found[row : row + 1], expected, rtol=1e-3, atol=1e-3).item()


def test_mlx_lms_batch_generator(model: Any) -> None:
    """Prompts of 4, 9 and 13 tokens with caches of ours in mlx-lm's batches: the tokens of the solo runs."""
    prompts = [toys.tokens(1, length, seed=length)[0].tolist() for length in (4, 9, 13)]
    expected = []
    for prompt in prompts:
        steps = generate_step(mx.array(prompt), model, max_tokens=10, prompt_cache=make_cache(model, EIGHT), stream=CPU)
        expected.append([int(token) for token, _ in steps])
    generator = BatchGenerator(model, max_tokens=10, stream=CPU)
    uids = generator.insert(prompts, caches=[make_cache(model, EIGHT) for _ in prompts])
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for one in responses:
            found[one.uid].append(int(one.token))
    assert [found[uid] for uid in uids] == expected


def test_refused_before_the_first_token(model: Any) -> None:
    """Rollback caches, and rows of different bits."""
    for entries, name in ((None, "SlidingRollbackCache"), (EIGHT, "QuantizedRollbackCache")):
        caches = make_cache(model, entries, rollback=True)
        with pytest.raises(StraightlineError, match=rf"^{name} cannot be batched, since each row would roll back by"):
            caches[0].merge([caches[0], caches[0]])
    with pytest.raises(StraightlineError) as refused:
        QuantizedRingCache(4, 32, 8).merge([QuantizedRingCache(4, 32, 8), QuantizedRingCache(8, 32, 8)])
    assert str(refused.value) == (
        "a batch of QuantizedRingCache cannot hold a QuantizedRingCache of 8 bits in groups of 32; expected 4 bits in "
        "groups of 32 in every row: make all caches with the same kv_config"
    )
    with pytest.raises(StraightlineError, match="cannot hold a RotatingKVCache; expected 4 bits in groups of 32"):
        QuantizedRingCache(4, 32, 8).merge([QuantizedRingCache(4, 32, 8), RotatingKVCache(8)])
    with pytest.raises(StraightlineError, match="cannot hold a SlidingRollbackCache: make all"):
        RotatingKVCache(8).merge([RotatingKVCache(8), SlidingRollbackCache(8)])
    filled = KVCache()
    filled.update_and_fetch(*random_rows(np.random.default_rng(0), 3))
    for growing in (KVCache(), filled):
        with pytest.raises(StraightlineError, match="a batch of KVCache cannot hold a QuantizedGrowingCache: make all"):
            growing.merge([growing, QuantizedGrowingCache(4, 32)])
    batch = QuantizedRingCache(4, 32, 8).merge([QuantizedRingCache(4, 32, 8)])
    with pytest.raises(StraightlineError, match="a batch of BatchQuantizedRingCache cannot hold"):
        batch.extend(QuantizedGrowingCache(4, 32).merge([QuantizedGrowingCache(4, 32)]))


@pytest.mark.parametrize("fill", [0, 5])
@pytest.mark.parametrize("how", ["merged", "joining", "joining later"])
def test_plain_ones_refuse_others_by_name(fill: int, how: str) -> None:
    """mlx-lm's plain caches and batches, which know nothing of ours, with quantized and rollback caches after them."""
    model = specialize(toys.build(toys.D6), file_of(toys.D6))

    def caches(*arguments: Any, **named: Any) -> list[Any]:
        made: list[Any] = make_cache(model, *arguments, **named)
        if fill:
            model(toys.tokens(1, fill), cache=made)
        return made

    def join(first: list[Any], second: list[Any]) -> None:
        generator = BatchGenerator(model, max_tokens=6, prefill_batch_size=1 + (how == "merged"), stream=CPU)
        generator.insert([[1, 2, 3]], caches=[first])
        for _ in range(3 if how.endswith("later") else 0):
            generator.next()
        generator.insert([[4, 5]], caches=[second])
        for _ in range(6):
            generator.next()

    of_mlx_lm = {"RotatingKVCache": mlx_lm_cache.RotatingKVCache, "KVCache": mlx_lm_cache.KVCache}
    others = {
        "batch of KVCache|BatchQuantizedGrowingCache cannot join": caches([EIGHT[2]]),
        "batch of RotatingKVCache|BatchQuantizedRingCache cannot join": caches([EIGHT[0]]),
        "hold a SlidingRollbackCache|SlidingRollbackCache cannot be batched": caches(rollback=True),
        "hold a QuantizedRollbackCache|QuantizedRollbackCache cannot be batched": caches(EIGHT, rollback=True),
    }
    for message, other in others.items():
        with pytest.raises(StraightlineError, match=message):
            join(caches(), other)
    if fill:
        for other in others.values():
            plain = [of_mlx_lm[type(one).__name__].from_state(one.state) for one in caches()]  # as it loads them
            with pytest.raises(StraightlineError, match=r"cannot (join|be batched|hold)"):
                join(plain, other)


def test_other_layouts_have_no_such_attribute() -> None:
    quantized, rollback = QuantizedGrowingCache(4, 32), SlidingRollbackCache(8)
    assert not hasattr(quantized, "keys") and getattr(rollback, "max_size", None) is None
    assert not hasattr(quantized.merge([quantized]), "_idx")


def test_a_batch_through_its_state() -> None:
    """mlx-lm's own batch caches come out of from_state unfit for a prompt; these do not."""
    rng = np.random.default_rng(2)
    for layout in ("ring", "growing"):
        solo = [make(layout), make(layout)]
        for cache, fill in zip(solo, (3, 12), strict=True):
            cache.update_and_fetch(*random_rows(rng, fill))
        batch = solo[0].merge(solo)
        again = type(batch).from_state(batch.state)
        for length in (1, 4, 1):
            rows = tuple(mx.concatenate([one, one], axis=0) for one in random_rows(rng, length))
            queries = mx.concatenate([rows[0], rows[0]], axis=1)
            assert_same(
                attend(again, queries, rows, window_of(layout)),  # type: ignore[arg-type]
                attend(batch, queries, rows, window_of(layout)),  # type: ignore[arg-type]
                "attention",
            )
        again.finalize()
        assert mlx_lm_cache.can_trim_prompt_cache([again]) == mlx_lm_cache.can_trim_prompt_cache([batch])
