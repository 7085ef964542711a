"""B53, B78: what the generated file does not take goes to the monolith whole, with a reason; strict mode raises."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import Case, assert_same, file_of
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from straightline.runtime import HiddenTap, StraightlineError, specialize


class OwnCache(KVCache):
    """A user's cache: it may change what it returns, so only its own attention path is right for it."""


def caches(**replaced: Any) -> Any:
    """D6's usual caches with some replaced: `at2=...`."""

    def make(case: Case) -> list[Any]:
        usual: list[Any] = case.model.make_cache()
        for key, new in replaced.items():
            usual[int(key[2:])] = new()
        return usual

    return make


CACHES: dict[str, tuple[Any, str]] = {
    "quantized": (caches(at2=QuantizedKVCache), "cache 2 is QuantizedKVCache, file expects KVCache"),
    "two unknown": (caches(at5=OwnCache, at2=OwnCache), "cache 2 is OwnCache, file expects KVCache"),
    "concatenating": (caches(at5=ConcatenateKVCache), "cache 5 is ConcatenateKVCache, file expects KVCache"),
    "plain in place of a ring": (caches(at0=KVCache), "cache 0 is KVCache, file expects RotatingKVCache"),
    "ring in place of plain": (
        caches(at2=lambda: RotatingKVCache(64)),
        "cache 2 is RotatingKVCache, file expects KVCache",
    ),
    "none in one place": (caches(at3=lambda: None), "cache 3 is NoneType, file expects RotatingKVCache"),
    "too few": (lambda case: case.model.make_cache()[:5], "cache has 5 entries, file expects 6"),
    "empty": (lambda case: [], "cache has 0 entries, file expects 6"),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches(name: str) -> None:
    """B53: right numbers from the monolith, never a half-generated mix; the next usual call is generated again."""
    make, reason = CACHES[name]
    case = Case(toys.D6)
    with pytest.raises(StraightlineError) as error:
        case.model(case.tokens(1, 4), cache=make(case))
    assert str(error.value) == f"strict: the generated file cannot serve this call: {reason}"
    case.model.dispatch.strict = False
    mine, plain = make(case), make(case)
    for count, length in enumerate((4, 1), start=1):
        ids = case.tokens(1, length)
        tap = HiddenTap(case.everything)
        assert_same(case.model(ids, cache=mine, tap=tap), case.plain(ids, cache=plain), "logits")
        assert_same(dict(sorted(tap.captured.items())), dict(sorted(case.plain.rows.items())), "taps")
        assert case.model.dispatch.last == ("monolith", reason)
        assert case.model.dispatch.counts == {"generated": 0, "monolith": count}
    case.model(ids, cache=case.model.make_cache())
    assert case.model.dispatch.last == ("generated", "")
    assert case.model.dispatch.counts == {"generated": 1, "monolith": 2}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda usual: tuple(usual), "cache is a tuple, file expects a list"),
        (lambda usual: [*usual, KVCache()], "cache has 7 entries, file expects 6"),
        (lambda usual: usual[0], "cache is a RotatingKVCache, file expects a list"),
        (lambda usual: [ArraysCache(2), *usual[1:]], "cache 0 is ArraysCache, file expects RotatingKVCache"),
    ],
)
def test_caches_that_mlx_lm_does_not_take_either(make: Any, reason: str) -> None:
    """The monolith decides, and whatever it does or raises is what plain mlx-lm does or raises."""
    case = Case(toys.D6)
    case.model.dispatch.strict = False
    outcomes = []
    for call in (case.model, case.plain):
        try:
            outcomes.append(call(case.tokens(1, 4), cache=make(case.model.make_cache())))
        except Exception as error:
            outcomes.append(type(error).__name__)
    assert_same(outcomes[0], outcomes[1], "outcome")
    assert case.model.dispatch.last == ("monolith", reason)


IDS: dict[str, tuple[Any, str]] = {
    "one dimension": (mx.array([1, 2, 3]), "inputs are of shape [3], file expects token ids [B, L]"),
    "three dimensions": (mx.ones((1, 2, 3), mx.int32), "inputs are of shape [1, 2, 3], file expects token ids [B, L]"),
    "no tokens": (mx.ones((1, 0), mx.int32), "inputs are of shape [1, 0], file expects token ids [B, L]"),
    "no rows": (mx.ones((0, 4), mx.int32), "inputs are of shape [0, 4], file expects token ids [B, L]"),
    "a list": ([[1, 2]], "inputs are list, file expects token ids [B, L]"),
    "nothing": (None, "inputs are NoneType, file expects token ids [B, L]"),
}


@pytest.mark.parametrize("name", IDS)
def test_inputs(name: str) -> None:
    ids, reason = IDS[name]
    case = Case(toys.D6)
    with pytest.raises(StraightlineError) as error:
        case.model(ids)
    assert str(error.value) == f"strict: the generated file cannot serve this call: {reason}"
    case.model.dispatch.strict = False
    outcomes = []
    for call in (case.model, case.plain):
        try:
            outcomes.append(call(ids))
        except Exception as failure:
            outcomes.append(repr(failure))
    assert_same(outcomes[0], outcomes[1], "outcome")
    assert case.model.dispatch.last == ("monolith", reason)
    assert case.model.dispatch.counts["generated"] == 0


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint8, mx.int16], ids=str)
def test_ids_of_any_integer_dtype(dtype: mx.Dtype) -> None:
    case = Case(toys.E6)
    ids = case.tokens(1, 6).astype(dtype)
    assert_same(case.model(ids), case.plain(ids), "logits")
    assert case.model.dispatch.last == ("generated", "")


def test_other_arguments() -> None:
    case = Case(toys.D6)
    ids = case.tokens(1, 3)
    embeddings = case.plain.model.model.embed_tokens(ids)
    strict = "strict: the generated file cannot serve this call: "
    for given, reason in (
        ({"input_embeddings": embeddings}, "input_embeddings are given, file expects token ids"),
        ({"per_layer_inputs": embeddings}, "per_layer_inputs are given, file computes its own"),
        ({"mask": None}, "mask is given, file does not know it"),
        ({"return_hidden": True, "mask": None}, "mask is given, file does not know it"),
    ):
        with pytest.raises(StraightlineError) as error:
            case.model(ids, **given)
        assert str(error.value) == strict + reason
    case.model.dispatch.strict = False
    with pytest.raises(TypeError, match="mask"):
        case.model(ids, mask=None)
    assert case.model.dispatch.last == ("monolith", "mask is given, file does not know it")
    assert_same(case.model(ids, input_embeddings=embeddings), case.plain(ids, input_embeddings=embeddings), "logits")
    assert case.model.dispatch.counts == {"generated": 0, "monolith": 2}


@pytest.mark.parametrize("outer", [False, True])
def test_a_file_of_another_architecture(outer: bool) -> None:
    """B78: refused by its fingerprint at once; not strict, all calls go to the monolith and say why."""
    model = toys.build(toys.D6, outer=outer)
    file, own = file_of(toys.config(rms_norm_eps=1e-5)), file_of(toys.D6)
    reason = f"the file is made for the fingerprint {file.FINGERPRINT}, but the model has {own.FINGERPRINT}"
    with pytest.raises(StraightlineError) as error:
        specialize(model, file, strict=True)
    assert str(error.value) == f"strict: {reason}"
    loose = specialize(model, file)
    ids = toys.tokens(1, 5)
    tap = HiddenTap([0, 6])
    assert_same(loose(ids, tap=tap), model(ids), "logits")
    assert sorted(tap.captured) == [0, 6]
    assert loose.dispatch.counts == {"generated": 0, "monolith": 1}
    assert loose.dispatch.last == ("monolith", reason)
    assert (loose.dispatch.reason, loose.dispatch.file) == (reason, None)


def test_no_file_for_this_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a module the packaged files and the user's are searched; no toy is among them."""
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path))
    model = specialize(toys.build(toys.D6))
    reason = (
        f"no generated file has the fingerprint {file_of(toys.D6).FINGERPRINT}; "
        "make one with specialize(model, generate=True)"
    )
    assert model.dispatch.reason == reason
    model(toys.tokens(1, 2))
    assert model.dispatch.last == ("monolith", reason)


def test_counts_are_per_model() -> None:
    first, second = Case(toys.D6), Case(toys.D6)
    assert first.model.dispatch.last == ("", "")
    first.model(first.tokens(1, 2))
    first.model.monolith(first.tokens(1, 2))
    assert first.model.dispatch.counts == {"generated": 1, "monolith": 0}
    assert second.model.dispatch.counts == {"generated": 0, "monolith": 0}
