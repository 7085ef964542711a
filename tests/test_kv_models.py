"""B40, B41, B43, B59: quantized and rollback caches through toy models, monolith and file."""

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import assert_same, file_of
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as mlx_lm_cache
from pairs import pair

from straightline.runtime import HiddenTap, StraightlineError, make_cache, specialize
from straightline.runtime.kv import (
    KVCache,
    QuantizedGrowingCache,
    QuantizedRingCache,
    RotatingKVCache,
    SlidingRollbackCache,
)
from straightline.runtime.kv.device import packing

MODELS = {"D6": toys.D6, "E6": toys.E6, "M6": toys.M6}
SEEDS = {"D6": 0, "E6": 0, "M6": 9}  # of models that do not say one token for ever
WINDOW = 8
Entries = list[dict[str, int]]


def kv(**layers: tuple[int, int]) -> Entries:
    """kv(l0=(4, 64)) is layer 0 with 4 bits in groups of 64."""
    return [{"layer_idx": int(name[1:]), "bits": bits, "group_size": group} for name, (bits, group) in layers.items()]


MIXES: dict[str, Entries | None] = {
    "plain": None,
    "8 bits": kv(l0=(8, 64), l1=(8, 64), l2=(8, 64)),
    "mixed": kv(l0=(3, 32), l1=(4, 64), l2=(8, 32)),
    "full only": kv(l2=(8, 64)),
    "one ring": kv(l1=(6, 32)),
}


@lru_cache(maxsize=8)
def plain(name: str) -> Any:
    """mlx-lm's model, which straightline never sees."""
    return toys.build(MODELS[name], seed=SEEDS[name])


@lru_cache(maxsize=8)
def served(name: str) -> Any:
    """The same weights, specialized; what the file is not made for goes to the monolith."""
    return specialize(toys.build(MODELS[name], seed=SEEDS[name]), file_of(MODELS[name]))


def path_of(name: str, path: str) -> Callable[..., mx.array]:
    model = served(name)
    return model.monolith if path == "monolith" else model


def greedy(forward: Any, prompt: mx.array, caches: list[Any], count: int) -> list[int]:
    """Plain greedy decoding, one token at a time."""
    tokens: list[int] = []
    logits = forward(prompt, cache=caches)
    for _ in range(count):
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
        logits = forward(mx.array([[tokens[-1]]]), cache=caches)
    return tokens


@lru_cache(maxsize=16)
def _truth(name: str, mix: str) -> list[int]:
    """Greedy tokens of the monolith with caches that do not roll back: mlx-lm's own rings where nothing is packed."""
    model = served(name)
    caches = plain(name).make_cache() if mix == "plain" else make_cache(model, MIXES[mix])
    return greedy(model.monolith, toys.tokens(1, 4), caches, 60)


@pytest.mark.parametrize("mix", ["plain", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_mlx_lms_speculative_decoding(name: str, mix: str) -> None:
    """B59 and B60 through mlx-lm's own loop, with a draft model that is wrong most of the time, and one list of caches.

    mlx-lm splits the list at the number of layers, which on E sizes is more than there are caches.
    """
    model, draft = served(name), toys.build(toys.D6, seed=5)
    before = dict(model.dispatch.counts)
    caches = make_cache(model, MIXES[mix], rollback=True, every_layer=True) + make_cache(draft, rollback=True)
    prompt = toys.tokens(1, 4)[0]
    found = speculative_generate_step(
        prompt, model, draft, num_draft_tokens=3, max_tokens=40, prompt_cache=caches, stream=mx.default_stream(mx.cpu)
    )
    truth = _truth(name, mix)[:40]
    assert [int(token) for token, *_ in found] == truth
    assert len(set(truth)) > 10
    assert (model.dispatch.counts["monolith"] == before["monolith"]) == (mix == "plain")


@pytest.mark.parametrize("name", MODELS)
def test_verify_block_is_the_single_steps(name: str) -> None:
    """B66: a cache of 5, 7, 11 and 30 tokens, then a block of 4, against 4 steps: close logits, the same tokens kept.

    Bits of different widths differ in mlx-lm too (matmuls of another shape), so of a rejected block and a clean cache.
    """
    model = served(name)
    for filled in (5, 7, 11, 30):
        ids = toys.tokens(1, filled + 8, seed=filled)
        block, steps, clean = (make_cache(model, rollback=True) for _ in range(3))
        for caches in (block, steps, clean):
            model(ids[:, :filled], cache=caches)
        at_once = model(ids[:, filled : filled + 4], cache=block)
        one_by_one = [model(ids[:, filled + i : filled + i + 1], cache=steps) for i in range(4)]
        assert mx.allclose(at_once, mx.concatenate(one_by_one, axis=1), rtol=1e-3, atol=1e-4).item()
        assert mlx_lm_cache.trim_prompt_cache(block, 4) == 4
        assert_same([one.state for one in block], [one.state for one in clean], "state")
        for width in (1, 3):
            tokens = ids[:, filled + 4 : filled + 4 + width]
            assert_same(model(tokens, cache=block), model(tokens, cache=clean), "logits")


class FakeQuantized:
    """Plain cache whose rows went through quantization and back: the reference for the packed ones."""

    def __init__(self, plain: Any, packing: dict[str, int] | None) -> None:
        self.plain, self.packing = plain, packing

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if self.packing:
            keys, values = (mx.dequantize(*mx.quantize(one, **self.packing), **self.packing) for one in (keys, values))
        return self.plain.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def fake(name: str, entries: Entries | None) -> list[Any]:
    plains = plain(name).make_cache()
    packings = {one["layer_idx"]: {key: one[key] for key in ("bits", "group_size")} for one in entries or []}
    return [FakeQuantized(one, packings.get(index)) for index, one in enumerate(plains)]


def run(forward: Any, caches: list[Any]) -> mx.array:
    """Logits of a prefill, chunks on both sides of the window, and steps through three of them."""
    ids, parts = toys.tokens(1, 45), []
    for length in (5, 7, 9, *(1,) * 24):
        parts.append(forward(ids[:, :length], cache=caches))
        ids = ids[:, length:]
    result = mx.concatenate(parts, axis=1)
    mx.eval(result)
    return result


# Largest difference of logits (up to about 3 here) between packed caches and the reference; float32 rounding only.
BOUND = 2e-4


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_against_dequantized(name: str, mix: str) -> None:
    """B40, B41: sharing, K = V and experts within a stated bound, which one layer's bits taken for another's break."""
    model, entries = served(name), MIXES[mix]
    found = run(model, make_cache(model, entries))
    monolith = run(model.monolith, make_cache(model, entries))
    assert_same(found, monolith, "dispatched and monolith")
    reference = run(plain(name), fake(name, entries))
    assert mx.abs(found - reference).max().item() < BOUND
    if mix != "mixed":
        return
    for swapped in (kv(l0=(4, 64), l1=(3, 32), l2=(8, 32)), kv(l0=(3, 32), l1=(8, 32), l2=(4, 64))):
        other = run(plain(name), fake(name, swapped))
        assert mx.abs(found - other).max().item() > 50 * BOUND
    for group in (kv(l0=(3, 32), l1=(4, 32), l2=(8, 32)), kv(l0=(3, 32), l1=(4, 64), l2=(8, 64))):
        other = run(plain(name), fake(name, group))
        assert mx.abs(found - other).max().item() > 5 * BOUND


def test_tapped_and_untapped_are_the_same() -> None:
    """B40 through the tapped monolith."""
    model, ids = served("E6"), toys.tokens(1, 12)
    tap = HiddenTap(range(-1, 7))
    tapped = model.monolith(ids, cache=make_cache(model, MIXES["mixed"]), tap=tap)
    assert_same(tapped, model.monolith(ids, cache=make_cache(model, MIXES["mixed"])), "logits")
    assert len(tap.captured) == 8


def test_classes_are_what_the_kv_config_says() -> None:
    """B43: class, bits and group of each cache, per layer."""
    model = served("D6")
    found = make_cache(model, kv(l0=(4, 32), l2=(8, 64), l3=(0, 64), l5=(2, 64)))
    described = [(type(one).__name__, *packing(one)) for one in found]
    assert described == [
        ("QuantizedRingCache", 4, 32),
        ("RotatingKVCache", None, None),
        ("QuantizedGrowingCache", 8, 64),
        ("RotatingKVCache", None, None),
        ("RotatingKVCache", None, None),
        ("QuantizedGrowingCache", 2, 64),
    ]
    names = [type(one).__name__ for one in make_cache(model, kv(l0=(4, 32)), rollback=True)]
    sliding, full = "SlidingRollbackCache", "GrowingKVCache"
    assert names == ["QuantizedRollbackCache", sliding, full, sliding, sliding, full]


@pytest.mark.parametrize("name", ["D6", "E6"])
@pytest.mark.parametrize("start", [0, 12])
def test_mlx_lm_generate_with_kv_bits(name: str, start: int) -> None:
    """`mlx_lm.generate --kv-bits 8` on a specialized model: rings too, from the first chunk or from token 12 on."""
    model = served(name)
    caches = model.make_cache()
    steps = generate_step(
        toys.tokens(1, 11)[0],
        model,
        max_tokens=24,
        prompt_cache=caches,
        kv_bits=8,
        quantized_kv_start=start,
        prefill_step_size=4,
        stream=mx.default_stream(mx.cpu),
    )
    found = [int(token) for token, _ in steps]
    assert all(packing(one) == (8, 64) for one in caches)
    assert {type(one).__name__ for one in caches} == {"QuantizedRingCache", "QuantizedGrowingCache"}
    assert found == _converted_midway(plain(name), toys.tokens(1, 11), start, 24)
    with pytest.raises(NotImplementedError):  # what plain mlx-lm does; if it learns to, ours is not needed any more
        mlx_lm_cache.RotatingKVCache(8).to_quantized()


def test_one_cache_of_mlx_lms_for_two_layers_is_refused() -> None:
    model = served("D6")
    caches = [mlx_lm_cache.RotatingKVCache(8)] * len(model.make_cache())
    for call in (model, model.monolith):
        with pytest.raises(StraightlineError, match="a cache is in the list twice; expected one for each layer"):
            call(toys.tokens(1, 1), cache=caches)


@pytest.mark.parametrize("name", ["D6", "E6"])
@pytest.mark.parametrize("file", [True, False], ids=["generated", "monolith"])
@pytest.mark.parametrize("filled, start", [(6, 0), (11, 0), (11, 16)])
def test_caches_loaded_by_mlx_lm_with_kv_bits(name: str, file: bool, filled: int, start: int, tmp_path: Path) -> None:
    """mlx-lm's `load_prompt_cache` gives mlx-lm's rings. From the first call on they do what the model's own do."""
    model = served(name) if file else specialize(toys.build(MODELS[name], seed=SEEDS[name]))
    before = dict(model.dispatch.counts)
    own, loaded = model.make_cache(), _kept(model, filled, tmp_path)
    mx.eval(model(toys.tokens(1, filled), cache=own))
    assert {type(one) for one in loaded} == {mlx_lm_cache.RotatingKVCache, mlx_lm_cache.KVCache}
    held = list(loaded)
    found, expected = (
        list(
            generate_step(
                toys.tokens(1, 3, seed=2)[0],
                model,
                max_tokens=12,
                prompt_cache=caches,
                kv_bits=8,
                quantized_kv_start=start,
                stream=mx.default_stream(mx.cpu),
            )
        )
        for caches in (loaded, own)
    )
    assert_same(found, expected, "tokens and log-probabilities")
    assert_same([one.state for one in loaded], [one.state for one in own], "state")
    assert [type(one) for one in loaded] == [type(one) for one in own]
    assert all(packing(one) == (8, 64) for one in loaded)
    assert {type(one) for one in held} == {RotatingKVCache, KVCache}  # the caller's own, too, are those that were run
    after = model.dispatch.counts
    assert after["generated"] > before["generated"] if file else not after["generated"]


@pytest.mark.parametrize("filled", [5, 11])
def test_caches_loaded_by_mlx_lm_trimmed_saved_and_merged(filled: int, tmp_path: Path) -> None:
    model = served("D6")
    lists = model.make_cache(), _kept(model, filled, tmp_path)
    mx.eval(model(toys.tokens(1, filled), cache=lists[0]))
    states: list[Any] = []
    for caches in lists:
        seen = [model(toys.tokens(1, 1), cache=caches), mlx_lm_cache.trim_prompt_cache(caches, 2)]
        seen.append(model(toys.tokens(1, 4), cache=caches))
        mlx_lm_cache.save_prompt_cache(str(tmp_path / "again.safetensors"), caches)
        again = mlx_lm_cache.load_prompt_cache(str(tmp_path / "again.safetensors"))
        batch = [one.merge([one, copy.copy(one)]) for one in caches]
        seen += [model(toys.tokens(1, 1, seed=3), cache=again), model(toys.tokens(2, 1, seed=3), cache=batch)]
        states.append([*seen, *([one.state for one in some] for some in (caches, again, batch))])
    assert_same(_lists(states[1]), _lists(states[0]), "results and states")
    assert states[0][1] == (2 if filled == 5 else 0)


def _kept(model: Any, filled: int, folder: Path) -> list[Any]:
    """A prompt of so many tokens as a file of mlx-lm's holds it."""
    caches = model.make_cache()
    mx.eval(model(toys.tokens(1, filled), cache=caches))
    mlx_lm_cache.save_prompt_cache(str(folder / "prompt.safetensors"), caches)
    loaded: list[Any] = mlx_lm_cache.load_prompt_cache(str(folder / "prompt.safetensors"))
    return loaded


def _lists(value: Any) -> Any:
    return list(map(_lists, value)) if isinstance(value, (list, tuple)) else value


def _converted_midway(model: Any, ids: mx.array, start: int, count: int) -> list[int]:
    """The same decoding on mlx-lm's model over rows that went through quantization and back."""
    caches = model.make_cache()
    eight = {"group_size": 64, "bits": 8}
    tokens: list[int] = []
    for length in (4, 4, 2, *(1,) * count):
        logits = model(ids[:, :length], cache=caches)
        ids = ids[:, length:]
        if not ids.size:
            tokens.append(int(mx.argmax(logits[0, -1]).item()))
            ids = mx.array([tokens[-1:]])
        if caches[0].offset >= start and not isinstance(caches[0], FakeQuantized):
            for one in caches:
                one.keys, one.values = (
                    mx.dequantize(*mx.quantize(rows, **eight), **eight) for rows in (one.keys, one.values)
                )
            caches = [FakeQuantized(one, eight) for one in caches]
    return tokens


REFUSED = {
    "sharing": (
        "E6",
        [{"layer_idx": 4, "bits": 4, "group_size": 64}],
        "[0].layer_idx is 4; expected a layer that owns a cache: layer 4 reads that of layer 1, so list 1",
    ),
    "range": (
        "D6",
        [{"layer_idx": 6, "bits": 4, "group_size": 64}],
        "[0].layer_idx is 6; expected an integer from 0 to 5",
    ),
    "twice": ("D6", kv(l1=(4, 64)) + kv(l1=(4, 64)), "[1].layer_idx is 1 a second time; expected each layer once"),
    "bits": ("D6", kv(l0=(4, 64)) + kv(l1=(5, 64)), "[1].bits is 5; expected 0, 2, 3, 4, 6 or 8"),
    "group": ("D6", kv(l1=(4, 48)), "[0].group_size is 48; expected 32, 64 or 128"),
    "head": ("D6", kv(l1=(4, 128)), "[0].group_size is 128; expected a divisor of the 64 numbers of a head in layer 1"),
    "no group": (
        "D6",
        [{"layer_idx": 1, "bits": 4}],
        "[0].group_size is absent; expected the count of numbers that share a scale",
    ),
    "type": ("D6", [{"layer_idx": 1, "bits": True, "group_size": 64}], "[0].bits is true; expected 0, 2, 3, 4, 6 or 8"),
    "key": (
        "D6",
        [{"layer_idx": 1, "bits": 4, "group_size": 64, "mode": "mxfp4"}],
        '[0] has the key "mode"; expected layer_idx, bits and group_size only',
    ),
    "entry": ("D6", [3], "[0] is 3; expected an object"),
    "list": (
        "D6",
        {"bits": 4},
        'holds an object; expected an array of {"layer_idx", "bits", "group_size"}, one a layer',
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str) -> None:
    name, entries, message = REFUSED[what]
    separator = " " if message.startswith(("[", "holds")) else ""
    with pytest.raises(StraightlineError) as refused:
        make_cache(served(name), json.loads(json.dumps(entries)))
    assert str(refused.value) == f"make_cache: kv_config:{separator}{message}"


def test_refused_arguments() -> None:
    model = served("D6")
    with pytest.raises(StraightlineError, match="make_cache: rollback is 1; expected True or False"):
        make_cache(model, rollback=1)  # type: ignore[arg-type]
    with pytest.raises(StraightlineError, match="make_cache: depth is 4, but rollback is False; expected rollback"):
        make_cache(model, depth=4)
    with pytest.raises(StraightlineError, match="make_cache: depth is 0; expected an integer from 1 to 4096"):
        make_cache(model, rollback=True, depth=0)


def test_mixed_layouts_are_refused() -> None:
    """One mask serves all layers of a kind; mlx-lm would use the first cache's for the others' rows."""
    model = served("D6")
    caches = make_cache(model)
    caches[1] = SlidingRollbackCache(WINDOW)
    for forward in (model, model.monolith):
        with pytest.raises(StraightlineError) as refused:
            forward(toys.tokens(1, 3), cache=caches)
        assert str(refused.value) == (
            "cache 1 is SlidingRollbackCache, but cache 0 is RotatingKVCache, and one mask serves all sliding layers; "
            "expected caches of one make_cache"
        )


def test_any_mlx_lm_model_can_be_asked_for_caches() -> None:
    outer = toys.build(toys.E6, outer=True)
    assert [type(one) for one in make_cache(outer, MIXES["8 bits"])] == [
        QuantizedRingCache,
        QuantizedRingCache,
        QuantizedGrowingCache,
    ]
    assert type(make_cache(outer)[0]) is RotatingKVCache


@pytest.mark.parametrize("length", [3, 30])
def test_a_shallow_copy_goes_on_by_itself(length: int) -> None:
    """Caches write into their rows in place, so a copy that shared them would see what comes after it."""
    models = pair(toys.D6)
    caches = models.model.make_cache()
    mx.eval(models.model(toys.tokens(1, length), cache=caches))
    copies, twins = [copy.copy(cache) for cache in caches], copy.deepcopy(caches)
    models.model(toys.tokens(1, 1, seed=5), cache=caches)
    assert_same([cache.state for cache in copies], [cache.state for cache in twins], "state")
    ids = toys.tokens(1, 1, seed=6)
    assert_same(models.model(ids, cache=copies), models.model(ids, cache=twins), "logits")
