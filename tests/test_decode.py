"""`decode`, the one-token entry: what it serves and what not, its bits and its graph; projections joined for it."""

import copy
import io
import pickle
import types
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import toys
from comparing import (
    BFLOAT16,
    EIGHT_BIT,
    FLOAT16,
    FLOAT32,
    FOUR_BIT,
    MXFP4,
    Case,
    Trio,
    assert_same,
    assert_same_caches,
    mixed,
    same_bits,
    source_of,
)
from memory import settled
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.tuner.utils import remove_lora_layers
from test_adapters import adapt
from test_kv_generated import file_with, mixes

from straightline.runtime import HiddenTap, make_cache, specialize
from straightline.runtime.evaluation import evaluate_hidden
from straightline.runtime.joining import remembered
from straightline.runtime.taps import no_tap

SHAPES = {
    **toys.SHAPES,
    "D6": toys.D6,
    "M6": toys.M6,
    "E6": toys.E6,
    "experts and per-layer inputs": toys.config(**toys.SHARING | toys.EXPERTS),
}
WINDOWS = (1,) * 25  # three of them, from the first token


def apart(path: str, module: Any) -> Any:
    """No two projections of one input alike."""
    if path.endswith(("k_proj", "up_proj")):
        return EIGHT_BIT
    return False if path.endswith("v_proj") else FOUR_BIT


def spied(config: dict[str, Any], entries: Any = None) -> tuple[types.ModuleType, Counter[str]]:
    """A generated file that counts the calls of its two entries."""
    module = types.ModuleType("toy")
    if entries is None:
        exec(compile(source_of(config), "toy.py", "exec"), module.__dict__)
    else:
        module = file_with(config, entries)
    counts: Counter[str] = Counter()

    def spy(name: str, entry: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def counted(*args: Any) -> mx.array:
            counts[name] += 1
            return entry(*args)

        return counted

    for name in ("forward", "decode"):
        setattr(module, name, spy(name, getattr(module, name)))
    return module, counts


def spied_case(config: dict[str, Any], **how: Any) -> tuple[Case, Counter[str]]:
    module, counts = spied(config)
    case = Case(config, **how)
    case.model = specialize(case.model, module, strict=True)
    return case, counts


def both(model: Any, ids: mx.array, caches: tuple[Any, Any], what: str = "logits") -> None:
    """The same bytes from the specialized model and from its monolith."""
    found, expected = model(ids, cache=caches[0]), model.monolith(ids, cache=caches[1])
    mx.eval(found, expected)
    assert_same(found, expected, what)


def agree(model: Any, counts: Counter[str], steps: int = 3, entry: str = "decode") -> None:
    """A prompt over the window and some steps, all of which `entry` serves."""
    caches = model.make_cache(), model.make_cache()
    both(model, toys.tokens(1, 11), caches)
    counts.clear()
    for step in range(steps):
        both(model, toys.tokens(1, 1, seed=step), caches, f"step {step}")
    assert counts == {entry: steps}


def run(case: Case, counts: Counter[str], lengths: tuple[int, ...]) -> None:
    """decode, forward, the monolith and mlx-lm alone, call by call: logits, taps and caches."""
    trio = Trio(case)
    beside = case.model.make_cache()
    for step, length in enumerate(lengths):
        ids = case.tokens(1, length, seed=step)
        counts.clear()
        logits = trio(ids)
        assert counts == {"decode" if length == 1 else "forward": 1}
        bound = case.model._bound
        tap = HiddenTap(case.everything)
        forward = bound.routes[0].forward(bound.weights, ids, beside, tap.begin(bound.sentinel, length))
        assert_same(logits, forward, f"forward's logits of call {step}")
        rows = case.plain.rows
        assert_same(tap.captured, {index: rows[index] for index in tap.captured}, f"forward's taps of call {step}")
    assert_same_caches(trio.generated, beside, "forward's cache")


@pytest.mark.parametrize("name", SHAPES)
def test_three_windows_of_steps(name: str) -> None:
    run(*spied_case(SHAPES[name], quantize=FOUR_BIT), WINDOWS)


QUANTIZATIONS = {"plain": None, "8-bit": EIGHT_BIT, "mxfp4": MXFP4, "mixed": mixed, "apart": apart}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", ["D6", "M6", "E6", "experts and per-layer inputs"])
def test_quantizations(name: str, quantization: str) -> None:
    run(*spied_case(SHAPES[name], quantize=QUANTIZATIONS[quantization]), (6, 1, 1, 1, 1))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("quantization", ["4-bit", "mixed", "apart"])
@pytest.mark.parametrize("name", ["D6", "M6", "E6", "experts and per-layer inputs"])
def test_half_precision(name: str, quantization: str, dtype: mx.Dtype) -> None:
    quantize = {**QUANTIZATIONS, "4-bit": FOUR_BIT}[quantization]
    run(*spied_case(SHAPES[name], quantize=quantize, dtype=dtype), (7, 1, 1, 1))


def widened(*names: str) -> Callable[[Any], None]:
    """A change that makes every parameter of these names float32."""

    def change(model: Any) -> None:
        found = [(name, value) for name, value in tree_flatten(model.parameters()) if name.endswith(names)]
        assert found
        model.update(tree_unflatten([(name, value.astype(FLOAT32)) for name, value in found]))

    return change


@pytest.mark.parametrize(
    ("names", "quantize", "entry"),
    [
        (("layers.1.layer_scalar",), FOUR_BIT, "decode"),
        (("layers.1.layer_scalar",), None, "decode"),
        (("input_layernorm.weight",), FOUR_BIT, "decode"),
        (("q_proj.scales", "q_proj.biases"), FOUR_BIT, "forward"),
        (("q_proj.weight",), None, "forward"),
        (("up_proj.weight",), None, "forward"),
        (("layers.1.layer_scalar",), mixed, "forward"),  # mxfp4 beside 4-bit follows the stream, wherever that goes
    ],
    ids=["scalar", "scalar, plain", "norms", "q_proj", "q_proj, plain", "up_proj, plain", "scalar, mixed"],
)
def test_mixed_dtypes(names: tuple[str, ...], quantize: Any, entry: str) -> None:
    """Results of two dtypes cannot stand in one row: such a model has no one-token entry, and is right."""
    case, counts = spied_case(toys.D6, quantize=quantize, dtype=BFLOAT16, change=widened(*names))
    trio = Trio(case)
    for length in (9, 1, 1):
        trio(case.tokens(1, length))
    assert counts == Counter({"forward": 1}) + Counter({entry: 2})


# What it is not for.


def ring(size: int) -> Any:
    return RotatingKVCache(max_size=size)


@pytest.mark.parametrize("name", ["D6", "M6", "E6"])
def test_not_for_batches_nor_without_a_cache(name: str) -> None:
    case, counts = spied_case(SHAPES[name], quantize=FOUR_BIT)
    trio = Trio(case)
    trio(case.tokens(2, 5))
    trio(case.tokens(2, 1))
    for caches in (lambda: None, lambda: case.batch_caches([0])):
        trio = Trio(case, caches)
        trio(case.tokens(1, 1))
    assert counts == {"forward": 4}


@pytest.mark.parametrize("name", ["D6", "E6"])
def test_not_for_a_larger_ring(name: str) -> None:
    """One that reaches further back than the window needs a mask, from the window on."""
    case, counts = spied_case(SHAPES[name], quantize=FOUR_BIT)
    plain = case.plain.model.make_cache

    def larger() -> list[Any]:
        return [ring(16) if isinstance(cache, RotatingKVCache) else KVCache() for cache in plain()]

    trio = Trio(case, larger)
    for length in (6, *(1,) * 14):
        trio(case.tokens(1, length, seed=length))
    assert counts == {"forward": 15}

    def one_larger() -> list[Any]:
        caches = plain()
        last = max(index for index, cache in enumerate(caches) if isinstance(cache, RotatingKVCache))
        caches[last] = ring(16)
        return caches

    counts.clear()
    Trio(case, one_larger)(case.tokens(1, 1))
    assert counts == {"forward": 1}


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_not_for_caches_at_different_positions(behind: int) -> None:
    case, counts = spied_case(toys.D6, quantize=FOUR_BIT)
    trio = Trio(case)
    trio(case.tokens(1, 5))
    for caches in trio.caches:
        caches[behind].trim(1)
    counts.clear()
    trio(case.tokens(1, 1))
    trio(case.tokens(1, 1))
    assert counts == {"forward": 2}


@pytest.mark.parametrize("name", ["D6", "M6", "E6"])
def test_not_for_rollback_caches(name: str) -> None:
    module, counts = spied(SHAPES[name])
    model = specialize(toys.build(SHAPES[name], quantize=FOUR_BIT), module, strict=True)
    caches = tuple(make_cache(model, rollback=True, depth=4) for _ in range(2))
    for length in (7, 1, 1):
        both(model, toys.tokens(1, length, seed=length), caches)
    assert counts == {"forward": 3}


class Doubled(HiddenTap):
    """Edits in a way of its own."""

    def __call__(self, index: int, value: mx.array) -> mx.array:
        return value * 2 if index in self.layers else value


@pytest.mark.parametrize("name", ["D6", "M6", "E6"])
def test_not_for_edits(name: str) -> None:
    """An edited stream has another input norm; a tap that only looks is served, and so is the next call."""
    module, counts = spied(SHAPES[name])
    model = specialize(toys.build(SHAPES[name], quantize=FOUR_BIT), module, strict=True)
    caches = model.make_cache(), model.make_cache()
    both(model, toys.tokens(1, 5), caches)
    taps = [HiddenTap([-1, 2, 6], edit=lambda _, rows: rows * 1.5) for _ in range(2)]
    ids = toys.tokens(1, 1)
    counts.clear()
    logits = model(ids, cache=caches[0], tap=taps[0]), model.monolith(ids, cache=caches[1], tap=taps[1])
    assert_same(*logits, "edited logits")
    assert_same(*(tap.captured for tap in taps), "edited rows")
    assert counts == {"forward": 1}
    logits = model(ids, cache=caches[0], tap=Doubled([2])), model.monolith(ids, cache=caches[1], tap=Doubled([2]))
    assert_same(*logits, "doubled logits")
    assert counts == {"forward": 2}
    counts["forward"] = 1
    with model.tapped([1], edit=lambda _, rows: rows + 1):
        model(ids, cache=caches[0])
    assert counts == {"forward": 2}
    with model.tapped([1]) as recorder:
        model(ids, cache=caches[0])
    assert counts == {"forward": 2, "decode": 1}
    assert recorder.rows(1).shape == (1, 1, 64)


@pytest.mark.parametrize("mix", ["4 bits", "8 bits, last full plain", "mixed"])
@pytest.mark.parametrize("name", ["D6", "M6", "E6"])
def test_quantized_caches(name: str, mix: str) -> None:
    entries = mixes(name)[mix]
    module, counts = spied(SHAPES[name], entries)
    model = specialize(toys.build(SHAPES[name], quantize=FOUR_BIT), module, strict=True)
    caches = tuple(make_cache(model, entries) for _ in range(2))
    for step, length in enumerate((6, *(1,) * 6)):
        both(model, toys.tokens(1, length, seed=step), caches, f"call {step}")
    assert counts == {"forward": 1, "decode": 6}
    for mine, other in zip(*caches, strict=True):
        assert_same(*(dict(tree_flatten(one.state)) for one in (mine, other)), "cache")


# The host's work.


def primitives(*arrays: mx.array) -> int:
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


@pytest.mark.parametrize("name", SHAPES)
def test_fewer_primitives(name: str) -> None:
    model = specialize(toys.build(SHAPES[name], quantize=FOUR_BIT), spied(SHAPES[name])[0], strict=True)
    route, weights = model._bound.routes[0], model._bound.weights
    entries = (
        lambda ids, cache: route.decode(weights.single, route.sites, ids, cache, no_tap),
        lambda ids, cache: route.forward(weights, ids, cache, no_tap),
        lambda ids, cache: model.monolith(ids, cache=cache),
    )
    counts = []
    for entry in entries:
        cache = model.make_cache()
        mx.eval(model(toys.tokens(1, 5), cache=cache), [one.state for one in cache])
        counts.append(primitives(entry(toys.tokens(1, 1), cache)))
    assert 100 < counts[0] < counts[1] < counts[2]


# Joined projections.


WIDE = toys.config(hidden_size=256, intermediate_size=1024, num_attention_heads=8)
ROOM = 4096  # bytes, for the small arrays of a bind: folded router scales, copies of tables
KEYS = ("weight", "scales", "biases")


def wholes(model: Any) -> list[Any]:
    """What the joined parts remember, by part."""
    return [module._joined for module in model.modules() if module.__dict__.get("_joined") is not None]


def groups(model: Any) -> list[list[Any]]:
    """The projections of one input, of every layer."""
    found = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found.append([attention[name] for name in ("q_proj", "k_proj", "v_proj") if name in attention])
        found.append([mlp.gate_proj, mlp.up_proj])
    return found


def joined_slots(model: Any) -> list[str]:
    """Of the first layer: those whose parts are one matrix."""
    return [slot for slot, parts in zip(("qkv_proj", "gated"), groups(model), strict=False) if remembered(parts)]


def address(array: mx.array) -> int:
    return int(np.array(array, copy=False).__array_interface__["data"][0])


@pytest.mark.usefixtures("exact_memory")
def test_joined_weights_are_held_once() -> None:
    model = toys.build(WIDE, quantize=FOUR_BIT)
    before = dict(tree_flatten(model.parameters()))
    copies = {name: bytes(memoryview(value)) for name, value in before.items()}
    joinable = sum(part[key].nbytes for parts in groups(model) for part in parts for key in KEYS)
    del before
    start = settled()
    fast = specialize(model, spied(WIDE)[0], strict=True)
    assert abs(settled() - start) < ROOM < joinable / 10
    assert len(wholes(fast)) == 12
    for parts in groups(model):
        whole = parts[0]._joined.whole
        for number, key in enumerate(KEYS):
            place = address(whole[number])
            for part in parts:
                assert address(part[key]) == place
                place += part[key].nbytes
    after = dict(tree_flatten(model.parameters()))
    assert {name: bytes(memoryview(value)) for name, value in after.items()} == copies
    del fast, model, after, whole, parts, part
    assert settled() < start - joinable


def test_a_bind_leaves_nothing_behind() -> None:
    """The arrays that were joined are not kept in MLX's cache of buffers either."""
    model = toys.build(WIDE, quantize=FOUR_BIT)
    settled()
    specialize(model, spied(WIDE)[0], strict=True)
    assert mx.get_cache_memory() < ROOM


@pytest.mark.usefixtures("exact_memory")
def test_loading_and_deleting_comes_back_to_the_start() -> None:
    seen = []
    for _ in range(3):
        model = specialize(toys.build(toys.M6, quantize=FOUR_BIT), spied(toys.M6)[0], strict=True)
        cache = model.make_cache()
        mx.eval(model(toys.tokens(1, 5), cache=cache))
        mx.eval(model(toys.tokens(1, 1), cache=cache))
        del model, cache
        seen.append(settled())
    assert max(seen) - min(seen) < 4096


@pytest.mark.usefixtures("exact_memory")
def test_joined_once_for_all_who_share_the_modules() -> None:
    """Neither another bind nor another specialized model joins again, and joining is no change to bind after."""
    base = toys.build(toys.D6, quantize=FOUR_BIT)
    module, counts = spied(toys.D6)
    model = specialize(base, module, strict=True)
    first, bound = wholes(model), model._bound
    agree(model, counts)
    assert model._bound is bound
    layer = model.model.layers[0]
    layer.layer_scalar = layer.layer_scalar * 1
    agree(model, counts)
    assert model._bound is not bound
    bound = model._bound
    start = settled()
    other = specialize(base, spied(toys.D6)[0], strict=True)
    assert settled() - start < 4096
    agree(model, counts)
    assert model._bound is bound
    assert [id(one) for one in wholes(model)] == [id(one) for one in wholes(other)] == [id(one) for one in first]


def test_saving_sees_the_parts(tmp_path: Path) -> None:
    model, plain = (toys.build(toys.E6, quantize=FOUR_BIT) for _ in range(2))
    fast = specialize(model, spied(toys.E6)[0], strict=True)
    fast.save_weights(str(tmp_path / "weights.safetensors"))
    plain.save_weights(str(tmp_path / "plain.safetensors"))
    found, expected = (mx.load(str(tmp_path / f"{name}.safetensors")) for name in ("weights", "plain"))
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())), "file")
    assert (tmp_path / "weights.safetensors").stat().st_size == (tmp_path / "plain.safetensors").stat().st_size


@pytest.mark.usefixtures("exact_memory")
def test_weights_loaded_later(tmp_path: Path) -> None:
    """They are joined in place of the old ones, which are then gone."""
    module, counts = spied(WIDE)
    model = specialize(toys.build(WIDE, quantize=FOUR_BIT), module, strict=True)
    agree(model, counts)
    start, first = settled(), [weakref.ref(one) for one in wholes(model)]
    other = toys.build(WIDE, quantize=FOUR_BIT, seed=9)
    other.save_weights(str(tmp_path / "other.safetensors"))
    model.load_weights(str(tmp_path / "other.safetensors"))
    agree(model, counts)
    caches = model.make_cache(), other.make_cache()
    for length in (5, 1):
        ids = toys.tokens(1, length)
        assert_same(model(ids, cache=caches[0]), other(ids, cache=caches[1]), "logits")
    del other, caches
    assert abs(settled() - start) < ROOM
    assert len(wholes(model)) == len(first) == 12 and not any(one() for one in first)


@pytest.mark.parametrize("key", ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"])
@pytest.mark.parametrize("quantize", [FOUR_BIT, None], ids=["4-bit", "plain"])
def test_adapters(key: str, quantize: Any) -> None:
    """A wrapped part stands apart, and is joined again when it is taken out."""
    module, counts = spied(toys.D6)
    model = specialize(toys.build(toys.D6, quantize=quantize, dtype=BFLOAT16), module, strict=True)
    agree(model, counts, 1)
    held, other = len(wholes(model)), "qkv_proj" if "mlp" in key else "gated"
    adapt(model, key)
    agree(model, counts, 1)
    assert joined_slots(model) == ([other] if quantize else [])
    remove_lora_layers(model)
    agree(model, counts, 1)
    assert joined_slots(model) == (["qkv_proj", "gated"] if quantize else [])
    assert len(wholes(model)) == held == (12 if quantize else 0)


def test_a_wrapper_that_nobody_knows() -> None:
    """It may give any dtype, so nothing stands beside it."""

    class Wide(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, x: mx.array) -> mx.array:
            return self.inner(x).astype(FLOAT32)

    module, counts = spied(toys.D6)
    model = specialize(toys.build(toys.D6, quantize=FOUR_BIT, dtype=BFLOAT16), module, strict=True)
    attention = model.model.layers[1].self_attn
    attention.k_proj = Wide(attention.k_proj)
    agree(model, counts, 2, "forward")
    attention.k_proj = attention.k_proj.inner
    agree(model, counts, 2)


def test_a_whole_that_is_no_longer_used_is_dropped() -> None:
    """Where a part's arrays are replaced by some that do not join."""
    model = specialize(toys.build(toys.D6, quantize=FOUR_BIT), spied(toys.D6)[0], strict=True)
    attention = model.model.layers[0].self_attn
    eight = nn.QuantizedLinear(64, 256, bias=False, **EIGHT_BIT)
    attention.q_proj.update({key: eight[key] for key in KEYS})
    attention.q_proj.bits, attention.q_proj.group_size = eight.bits, eight.group_size
    both(model, toys.tokens(1, 1), (model.make_cache(), model.make_cache()))
    assert "_joined" not in attention.q_proj.__dict__
    assert len(wholes(model)) == 11


def test_quantized_after_it_was_specialized() -> None:
    module, counts = spied(toys.D6)
    model = specialize(toys.build(toys.D6), module, strict=True)
    agree(model, counts)
    assert not wholes(model)
    nn.quantize(model, **FOUR_BIT)
    agree(model, counts)
    assert len(wholes(model)) == 12


@pytest.mark.parametrize("how", ["deepcopy", "pickle of a module", "deepcopy of a module"])
def test_copies_have_arrays_of_their_own(how: str) -> None:
    module, counts = spied(toys.D6)
    model = specialize(toys.build(toys.D6, quantize=FOUR_BIT), module, strict=True)
    agree(model, counts, 1)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
        agree(twin, counts)
        norm = twin.model.layers[0].self_attn.q_proj
        norm.scales = norm.scales * 2
        agree(twin, counts)
        assert len(wholes(twin)) == 12
        assert not {id(one) for one in wholes(twin)} & {id(one) for one in wholes(model)}
    else:
        part = model.model.layers[0].self_attn.q_proj
        twin = copy.deepcopy(part) if how.startswith("deep") else pickle.loads(pickle.dumps(part))
        assert twin.__dict__["_joined"] is None and type(twin) is nn.QuantizedLinear
        assert_same(dict(twin.parameters()), dict(part.parameters()), "copy")
        model.model.layers[0].self_attn.q_proj = twin
    agree(model, counts)
    assert len(wholes(model)) == 12


def test_training_goes_to_the_monolith_and_comes_back() -> None:
    module, counts = spied(toys.D6)
    model = specialize(toys.build(toys.D6, quantize=FOUR_BIT), module)
    agree(model, counts, 1)
    adapt(model, "self_attn.q_proj")
    model.freeze()
    model.apply_to_modules(lambda path, one: one.unfreeze(keys=["lora_a", "lora_b"], recurse=False, strict=False))
    model.train()
    counts.clear()

    def loss(ids: mx.array) -> mx.array:
        return model(ids).square().mean()

    _, gradients = nn.value_and_grad(model, loss)(toys.tokens(1, 5))
    mx.eval(gradients)
    assert any(mx.any(value != 0).item() for _, value in tree_flatten(gradients))
    assert not counts and "training" in model.dispatch.last[1]
    model.eval()
    agree(model, counts, 1)


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize(("name", "stateful"), [("M6", False), ("E6", True)], ids=["M6", "E6, state"])
def test_compiled(name: str, stateful: bool) -> None:
    """A step under mx.compile, traced before `decode` has ever run. Its state comes back as new arrays, joined anew."""
    module, counts = spied(SHAPES[name])
    model = specialize(toys.build(SHAPES[name], quantize=FOUR_BIT), module, strict=True)
    held, start = wholes(model), settled()
    caches = model.make_cache(), model.make_cache()
    both(model, toys.tokens(1, 5), caches)
    counts.clear()
    ids = toys.tokens(1, 1)
    cache = copy.deepcopy(caches[0])
    step = mx.compile(partial(model, cache=cache), inputs=model.state if stateful else None)
    assert mx.allclose(step(ids), model.monolith(ids, cache=caches[1]), atol=1e-4).item()
    assert counts == {"decode": 1}
    agree(model, counts, 2)
    assert len(wholes(model)) == len(held)
    assert stateful or all(one is other for one, other in zip(wholes(model), held, strict=True))
    del step, cache, caches, held
    assert settled() - start < ROOM


def test_specialized_in_several_threads_at_once() -> None:
    """They join the same parts: once, and no bit is lost."""
    for _ in range(3):
        base = toys.build(toys.D6, quantize=FOUR_BIT)
        evaluate_hidden(base)  # they belong to the thread that built them
        modules = [spied(toys.D6) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            models = list(pool.map(lambda one, base=base: specialize(base, one[0], strict=True), modules))
        assert len(wholes(base)) == 12
        for parts in groups(base):
            assert parts[0]._joined.holds(parts)
        for model, (_, counts) in zip(models, modules, strict=True):
            agree(model, counts, 1)


def test_kernels_change_nothing_on_a_cpu() -> None:
    assert not mx.metal.is_available() and mx.default_device() == mx.cpu
    base = toys.build(toys.E6, quantize=FOUR_BIT, dtype=BFLOAT16)
    logits = []
    for kernels in (False, True):
        module, counts = spied(toys.E6)
        model = specialize(base, module, strict=True, kernels=kernels)
        agree(model, counts, 1)
        cache = model.make_cache()
        logits.append([model(toys.tokens(1, length), cache=cache) for length in (5, 1)])
    assert all(same_bits(*pair) for pair in zip(*logits, strict=True))
