"""What is done for CUDA's sake, tried on any device: rows are stored packed and handed out plain.

That this is needed there, and that all is equal then, is for a GPU to show: tests/gpu/quantized_attention.py, optiq.py.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparing import assert_same
from kv_reference import random_rows
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache
from test_kv_generated import MODELS, file_with, mixes
from toys import build, tokens

from straightline.runtime import HiddenTap, StraightlineError, make_cache, ops, specialize
from straightline.runtime.kv import (
    QuantizedGrowingCache,
    QuantizedRingCache,
    QuantizedRollbackCache,
    layouts,
    load_cache,
    quantized,
    save_cache,
)
from straightline.runtime.kv.files import describe

CLASSES: dict[str, Callable[[], Any]] = {
    "growing": lambda: QuantizedGrowingCache(4, 32),
    "ring": lambda: QuantizedRingCache(4, 32, 8),
    "rollback": lambda: QuantizedRollbackCache(4, 32, 8, 4),
    "batch growing": lambda: QuantizedGrowingCache.merge([filled(QuantizedGrowingCache(4, 32), n) for n in (3, 5)]),
    "batch ring": lambda: QuantizedRingCache.merge([filled(QuantizedRingCache(4, 32, 8), n) for n in (3, 5)]),
}


def filled(cache: Any, length: int) -> Any:
    cache.update_and_fetch(*random_rows(np.random.default_rng(length), length))
    return cache


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_handed_out_is_what_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a cache that hands them out packed, dequantized; and the same state."""
    usual = CLASSES[name]()
    monkeypatch.setattr(quantized, "PLAIN_ROWS", True)
    cache = CLASSES[name]()
    rng = np.random.default_rng(0)
    for length in (5, 1, 1, 9, 1, *(1,) * 12, 20, 1, 3, 1):
        rows: Any = random_rows(rng, length)
        if name.startswith("batch"):
            rows = [mx.repeat(one, 2, axis=0) for one in rows]
        monkeypatch.setattr(quantized, "PLAIN_ROWS", False)
        packed = usual.update_and_fetch(*rows), usual.keys_and_values()
        monkeypatch.setattr(quantized, "PLAIN_ROWS", True)
        plain = cache.update_and_fetch(*rows), cache.keys_and_values()
        expected = [[mx.dequantize(*one, 32, 4) for one in pair] for pair in packed]
        assert_same([list(pair) for pair in plain], expected, f"{length} more")
        assert_same(cache.state, usual.state, "state")
        assert cache.nbytes == usual.nbytes
    assert describe(cache) == describe(usual)
    assert not hasattr(cache, "bits")  # else mlx-lm takes the rows for packed
    assert not hasattr(type(cache).from_state(cache.state), "bits")


def test_attention_over_plain_rows_takes_packed_ones() -> None:
    """As the fast tier's exact form has them."""
    rng = np.random.default_rng(0)
    queries, keys = random_rows(rng, 3)[0], mx.quantize(random_rows(rng, 5)[0], 32, 4)
    plain = mx.dequantize(*keys, 32, 4)
    how: dict[str, Any] = {"scale": 1.0, "mask": "causal", "group_size": 32, "bits": 4}
    found = ops.attention_over_plain_rows(queries, tuple(keys), tuple(keys), **how)
    assert_same(found, ops.attention_over_plain_rows(queries, plain, plain, **how), "attention")


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "PLAIN_ROWS", True)
    monkeypatch.setattr(layouts, "PLAIN_ROWS", True)
    monkeypatch.delitem(layouts.LAYOUTS, mlx_lm_cache.QuantizedKVCache, raising=False)


def served(name: str, entries: Any) -> Any:
    file = file_with(MODELS[name], entries)
    vars(file)["quantized_attention"] = ops.attention_over_plain_rows  # what runs there on CUDA
    return specialize(build(MODELS[name]), file, strict=True)


def rounded(cache: Any, entry: dict[str, int] | None) -> Any:
    """mlx-lm's own plain cache, whose rows go through quantization and back before they are stored."""
    if entry is None:
        return cache
    packing = {"group_size": entry["group_size"], "bits": entry["bits"]}

    class Rounded(type(cache)):  # type: ignore[misc]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            return super().update_and_fetch(
                *(mx.dequantize(*mx.quantize(rows, **packing), **packing) for rows in (keys, values))
            )

    cache.__class__ = Rounded
    return cache


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", MODELS)
def test_both_paths_are_mlx_lms_plain_attention_over_the_rounded_rows(name: str) -> None:
    """Generated, monolith, and mlx-lm's own model, with these caches and with its own: one and the same bits."""
    entries = mixes(name)["mixed"]
    model, plain = served(name, entries), build(MODELS[name])
    by_layer = {entry["layer_idx"]: entry for entry in entries}
    own = [rounded(cache, by_layer.get(layer)) for layer, cache in enumerate(plain.make_cache())]
    ours, theirs, others = (make_cache(model, entries) for _ in range(3))
    layers = MODELS[name]["num_hidden_layers"]
    for step, length in enumerate((7, 9, 4, 1, 1, 8, 1)):
        ids = tokens(1, length, seed=step)
        taps = HiddenTap(range(-1, layers + 1)), HiddenTap(range(-1, layers + 1))
        found = model(ids, ours, tap=taps[0])
        assert_same(found, plain(ids, cache=own), f"logits of call {step}")
        assert_same(model.monolith(ids, theirs, tap=taps[1]), found, f"logits of call {step} by the monolith")
        assert_same(plain(ids, cache=others), found, f"logits of call {step} by mlx-lm")
        assert_same(taps[0].captured, taps[1].captured, f"taps of call {step}")
        for one, *rest in zip(ours, theirs, others, strict=True):
            for other in rest:
                assert_same(dict(tree_flatten(one.state)), dict(tree_flatten(other.state)), f"caches after call {step}")


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", ["D6", "E6", "26b"])
def test_rollback_batches_and_files(name: str, tmp_path: Any) -> None:
    """What was rejected leaves no trace; a batch is served; a saved cache goes on."""
    entries = mixes(name)["4 bits"]
    model = served(name, entries)
    tried, clean = make_cache(model, entries, rollback=True, depth=4), make_cache(
        model, entries, rollback=True, depth=4
    )
    for caches in (tried, clean):
        model(tokens(1, 11), caches)
    model(tokens(1, 4, seed=5), tried)
    assert [cache.trim(4) for cache in tried] == [4] * len(tried)
    last = tokens(1, 1, seed=6)
    assert_same(model(last, tried), model(last, clean), "after a rollback")

    first, second = make_cache(model, entries), make_cache(model, entries)
    model(tokens(1, 9), first)
    model(tokens(1, 9), second)
    save_cache(tmp_path / "cache", first, model)
    loaded = load_cache(tmp_path / "cache", model, entries)
    assert_same(model(last, loaded), model(last, second), "after a load")
    two = mx.concatenate([last, last])
    assert_same(model(two, batch(model, entries)), model.monolith(two, batch(model, entries)), "a batch")
    assert model.dispatch.counts["monolith"] == 0


def batch(model: Any, entries: Any) -> list[Any]:
    """Two prompts of different lengths."""
    solo = [make_cache(model, entries) for _ in range(2)]
    for length, caches in zip((9, 6), solo, strict=True):
        model(tokens(1, length), caches)
    return [type(one).merge([one, other]) for one, other in zip(*solo, strict=True)]


@pytest.mark.usefixtures("as_on_cuda")
def test_mlx_lms_own_quantized_cache_is_refused_by_name() -> None:
    entries = mixes("D6")["4 bits"]
    model = served("D6", entries)
    model.dispatch.strict = False
    caches = model.make_cache()
    caches[2] = mlx_lm_cache.QuantizedKVCache(64, 4)
    with pytest.raises(StraightlineError) as refused:
        model(tokens(1, 4), caches)
    assert str(refused.value) == (
        "cache 2 is mlx-lm's QuantizedKVCache, whose attention fails on CUDA; expected caches of "
        "make_cache(model, kv_config)"
    )
    assert all(one.offset == 0 for one in caches)
