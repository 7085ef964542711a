"""What is asked of `decode` on a GPU before it serves: run on the CPU here, with and without planted faults."""

import re
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from comparing import FOUR_BIT, assert_same, file_of
from test_kv_generated import file_with, mixes
from toys import D6, E6, M6, SHAPES, build, tokens

from straightline.runtime import make_cache, specialize
from straightline.runtime.kernels import resolve_all

MODELS = {"D6": D6, "M6": M6, "E6": E6, **SHAPES}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("straightline.runtime.bound.on_gpu", lambda: True)


def with_decode(file: types.ModuleType, decode: Any) -> types.ModuleType:
    copy = types.ModuleType(file.__name__)
    copy.__dict__.update(vars(file), decode=decode)
    return copy


@pytest.mark.parametrize("name", MODELS)
def test_it_is_as_good_as_forward(name: str) -> None:
    model = specialize(build(MODELS[name], quantize=FOUR_BIT), file_of(MODELS[name]), strict=True)
    assert model.dispatch.decode_reason == ""
    assert all(route.decode is not None for route in model._bound.routes)


def wrong_logits(decode: Any) -> Any:
    return lambda w, s, ids, caches, tap: decode(w, s, ids, caches, tap) * 1.0000001


def wrong_cache(decode: Any) -> Any:
    def changed(w: Any, s: Any, ids: Any, caches: Any, tap: Any) -> Any:
        logits = decode(w, s, ids, caches, tap)
        caches[3].keys = caches[3].keys * 1.0000001
        return logits

    return changed


def failing(decode: Any) -> Any:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("no kernel for that")

    return fails


FAULTS = {
    wrong_logits: r"its logits differ from those of forward at step 0: at flat index \d+ \(\d+ of 97 values; .+\)",
    wrong_cache: r"at step 0 it leaves another cache 3 than forward: keys at flat index \d+ \(\d+ of \d+ values; .+\)",
    failing: "it fails here: no kernel for that",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_turns_it_off_and_forward_serves(fault: Any) -> None:
    file = file_of(D6)
    model = specialize(build(D6), with_decode(file, fault(file.decode)), strict=True)
    assert re.fullmatch(FAULTS[fault], model.dispatch.decode_reason)
    caches, others = model.make_cache(), model.make_cache()
    for length in (6, 1, 1):
        assert_same(model(tokens(1, length), caches), model.monolith(tokens(1, length), others), "logits")
    assert model.dispatch.counts == {"generated": 3, "monolith": 0}


def test_a_fault_that_comes_and_goes_is_a_fault() -> None:
    """And the reason says that it went."""
    file = file_of(D6)
    planted = iter([wrong_cache(file.decode)])
    flawed = with_decode(file, lambda *arguments: next(planted, file.decode)(*arguments))
    dispatch = specialize(build(D6), flawed, strict=True, kernels=False).dispatch
    assert re.fullmatch(FAULTS[wrong_cache] + "; asked again, all is equal", dispatch.decode_reason)


def test_a_fault_over_quantized_caches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then single tokens over those take `forward`, and the others `decode`."""
    entries = mixes("D6")["4 bits"]
    file, packed = file_of(D6), file_with(D6, entries)
    files = [file, with_decode(packed, wrong_logits(packed.decode))]
    monkeypatch.setattr("straightline.runtime.serving_files.find_generated", lambda architecture: tuple(files))
    model = specialize(build(D6), strict=True)
    assert [route.decode is None for route in model._bound.routes] == [False, True]
    assert model.dispatch.decode_reason == "" and re.match(FAULTS[wrong_logits], model.dispatch.quantized_reason)
    caches, others = (make_cache(model, entries) for _ in range(2))
    for length in (6, 1, 1):
        assert_same(model(tokens(1, length), caches), model.monolith(tokens(1, length), others), "logits")
    files[1] = packed
    model = specialize(build(D6), strict=True)
    assert model.dispatch.quantized_reason == "" and len(model._bound.decode_checked) == 2


def test_asked_once_while_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    file, calls = file_of(D6), []
    counted = with_decode(file, lambda *arguments: calls.append(1) or file.decode(*arguments))
    model = specialize(build(D6), counted, strict=True)
    asked = len(calls)
    model.layers[0].layer_scalar = mx.array([0.5])
    model(tokens(1, 4))
    assert asked == len(calls) == 4  # two tokens of a sequence, and of a batch of one
    nn.quantize(model, **FOUR_BIT)
    model(tokens(1, 4))
    assert len(calls) == 8  # other kernels may serve now
    model.layers[0].layer_scalar = mx.array([0.25])
    model(tokens(1, 4))
    assert len(calls) == 8
    model.layers[1].mlp.up_proj = nn.QuantizedLinear(64, 128, bias=False, group_size=32, bits=8)
    model(tokens(1, 4))
    assert len(calls) == 12
    model.set_dtype(mx.bfloat16)
    model(tokens(1, 4))
    assert len(calls) == 16


def test_kernels_that_are_not_exact_together_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = file_of(D6), []

    def resolving(sites: Any, dtype: mx.Dtype, kernels: bool | None) -> Any:
        asked.append(kernels)
        return resolve_all(sites, dtype, kernels=kernels)

    def decode(*arguments: Any) -> Any:
        return file.decode(*arguments) * (1 if asked[-1] is False else 1.0000001)

    monkeypatch.setattr("straightline.runtime.routes.resolve_all", resolving)
    model = specialize(build(D6), with_decode(file, decode), strict=True)
    assert asked == [None, None, False, False]  # the kernels of products and sites, then the sites'
    together = model.dispatch.kernels_reason
    assert model.dispatch.decode_reason == "" and re.fullmatch(FAULTS[wrong_logits], together)
    assert model._bound.routes[0].decode is decode
    asked.clear()
    model.layers[0].layer_scalar = mx.array([0.5])
    model(tokens(1, 4))
    assert asked == [False, False]  # nor does the next binding ask for them again
    assert model.dispatch.kernels_reason == together
    asked.clear()
    model = specialize(build(D6), with_decode(file, wrong_logits(file.decode)), strict=True)
    assert asked == [None, None, False, False]  # the kernels of products and sites, then the sites'
    assert re.fullmatch(FAULTS[wrong_logits], model.dispatch.decode_reason) and not model.dispatch.kernels_reason
    asked.clear()
    specialize(build(D6), with_decode(file, wrong_logits(file.decode)), strict=True, kernels=False)
    assert asked == [False, False]
