"""Files with quantized K/V baked in, and files with plain K/V on rollback caches: bit-equal to mlx-lm's own forward."""

import json
import types
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from comparing import BFLOAT16, FLOAT32, FOUR_BIT, assert_same
from mlx.utils import tree_flatten
from toys import D6, E6, FULL, M6, SHAPES, build, config, tokens

from straightline.codegen import generate
from straightline.codegen.config import read_config
from straightline.codegen.kv import uniform_kv_config
from straightline.runtime import HiddenTap, StraightlineError, make_cache, specialize

Entries = list[dict[str, int]]
SCHEDULES = ((20, 1, 1, 4), (7, 9, 4, 1, 8, 1), (3, *(1,) * 22), (2, 5, 8, 3, 1, 6))
MODELS = {"D6": D6, "M6": M6, "E6": E6, "12b": SHAPES["12b"], "26b": SHAPES["26b"], "e4b": SHAPES["e4b"]}


def mixes(name: str) -> dict[str, Entries]:
    """All layers alike in several ways, and one mix in which every owner differs from its neighbours."""
    spec = read_config(MODELS[name])
    cycle = [(4, 64), (8, 32), (0, 0), (6, 64), (2, 32), (3, 64)]
    mixed = [
        {"layer_idx": layer, "bits": bits, "group_size": group}
        for layer, (bits, group) in zip(spec.owners, cycle * len(spec.owners), strict=False)
        if bits
    ]
    return {
        "4 bits": uniform_kv_config(spec, 4),
        "8 bits, last full plain": uniform_kv_config(spec, 8, 32, keep_last_full=True),
        "mixed": mixed,
    }


def file_with(flat: dict[str, Any], entries: Entries | None) -> types.ModuleType:
    return _file_with(json.dumps(flat, sort_keys=True), json.dumps(entries))


@cache
def _file_with(flat: str, entries: str) -> types.ModuleType:
    module = types.ModuleType("toy")
    source = generate(json.loads(flat), "toy", kv_config=json.loads(entries))
    exec(compile(source, "toy.py", "exec"), module.__dict__)
    return module


def assert_equal_runs(model: Any, caches: Any, batch: int, schedule: tuple[int, ...], layers: int) -> None:
    """Logits, taps and the state of every cache after every call, on both paths."""
    ours, theirs = caches(), caches()
    for step, length in enumerate(schedule):
        ids = tokens(batch, length, seed=step)
        taps = HiddenTap(range(-1, layers + 1)), HiddenTap(range(-1, layers + 1))
        found, expected = model(ids, ours, tap=taps[0]), model.monolith(ids, theirs, tap=taps[1])
        assert_same(found, expected, f"logits of call {step}")
        assert_same(taps[0].captured, taps[1].captured, f"taps of call {step}")
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*(dict(tree_flatten(one.state)) for one in (mine, other)), f"cache {index} after call {step}")
    assert model.dispatch.counts == {"generated": len(schedule), "monolith": 0}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mix", ["4 bits", "8 bits, last full plain", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_quantized_caches(name: str, mix: str, dtype: mx.Dtype) -> None:
    """B40, B41: sharing, K = V and experts; readers by the bits of their source."""
    flat, entries = MODELS[name], mixes(name)[mix]
    quantize = FOUR_BIT if dtype == BFLOAT16 else None
    number = [*MODELS].index(name) + [*mixes(name)].index(mix)
    model = specialize(build(flat, dtype=dtype, quantize=quantize), file_with(flat, entries), strict=True)
    schedule = SCHEDULES[number % len(SCHEDULES)]
    assert_equal_runs(model, lambda: make_cache(model, entries), 1 + number % 2, schedule, flat["num_hidden_layers"])


@pytest.mark.parametrize("name", MODELS)
def test_rollback_caches(name: str) -> None:
    """A plain file takes them; taking tokens back in between changes nothing of that."""
    flat = MODELS[name]
    model = specialize(build(flat), file_with(flat, None), strict=True)
    assert_equal_runs(
        model, lambda: make_cache(model, rollback=True, depth=4), 1, (6, 4, 1, 5, 1, 1), flat["num_hidden_layers"]
    )
    runs = []
    for forward in (model, model.monolith):
        caches = make_cache(model, rollback=True, depth=4)
        forward(tokens(1, 11), caches)
        forward(tokens(1, 4, seed=5), caches)
        assert [cache.trim(3) for cache in caches] == [3] * len(caches)
        runs.append(forward(tokens(1, 1, seed=6), caches))
    assert_same(*runs, "the token after a rollback")


def test_head_sizes_and_groups() -> None:
    """Groups of 128 on heads of 128, the full layers' own head size."""
    flat = config(global_head_dim=128, layer_types=[FULL, FULL], num_hidden_layers=2)
    entries = [{"layer_idx": 0, "bits": 4, "group_size": 128}, {"layer_idx": 1, "bits": 8, "group_size": 128}]
    model = specialize(build(flat), file_with(flat, entries), strict=True)
    assert_equal_runs(model, lambda: make_cache(model, entries), 3, (9, 1, 4, 1), 2)


def test_other_bits_go_to_the_monolith_and_are_right() -> None:
    """The reason names the cache and both formats; the numbers are those of mlx-lm with these caches."""
    eight, four = uniform_kv_config(read_config(E6), 8), uniform_kv_config(read_config(E6), 4)
    model = specialize(build(E6), file_with(E6, eight))
    ids = tokens(1, 9)
    found, expected = model(ids, make_cache(model, four)), model.monolith(ids, make_cache(model, four))
    assert_same(found, expected, "logits")
    reason = "cache 0 has 4 bits in groups of 64, file expects 8 in groups of 64"
    assert model.dispatch.last == ("monolith", reason)
    model(ids, model.make_cache())
    assert model.dispatch.last == ("monolith", "cache 0 is RotatingKVCache, file expects QuantizedRingCache")
    model(ids)
    assert model.dispatch.last == ("monolith", "cache is a NoneType, file expects a list")


def test_each_cache_list_finds_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model, a plain and a quantized file: the caches choose."""
    entries = uniform_kv_config(read_config(E6), 8)
    files = (file_with(E6, None), file_with(E6, entries))
    monkeypatch.setattr("straightline.runtime.serving_files.find_generated", lambda architecture: files)
    model = specialize(build(E6), strict=True)
    for caches in (model.make_cache(), make_cache(model, entries), make_cache(model, rollback=True), None):
        model(tokens(1, 5), caches)
    assert model.dispatch.counts == {"generated": 4, "monolith": 0}
    with pytest.raises(StraightlineError, match="cache 0 has 4 bits in groups of 64, file expects 8 in groups of 64"):
        model(tokens(1, 5), make_cache(model, uniform_kv_config(read_config(E6), 4)))
