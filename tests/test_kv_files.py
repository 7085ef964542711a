"""B47: prompt caches saved and loaded at any point, through mlx-lm's functions and through ours, go on bit-equal."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import assert_same, file_of
from mlx_lm.models import cache as mlx_lm_cache

from straightline.runtime import StraightlineError, make_cache, specialize
from straightline.runtime.kv import KVCache, RotatingKVCache, load_cache, save_cache
from straightline.runtime.kv.registered import register

EIGHT = [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(3)]
MIXED = [{"layer_idx": 0, "bits": 3, "group_size": 32}, {"layer_idx": 2, "bits": 4, "group_size": 64}]
MIXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"kv_config": EIGHT},
    "mixed": {"kv_config": MIXED},
    "rollback": {"rollback": True},
    "mixed, rollback": {"kv_config": MIXED, "rollback": True, "depth": 5},
}


@pytest.fixture(scope="module", params=["D6", "E6"])
def model(request: pytest.FixtureRequest) -> Any:
    config = {"D6": toys.D6, "E6": toys.E6}[request.param]
    return specialize(toys.build(config), file_of(config))


# Window 8: nothing, before, at and after the wrap of the ring; and of the rollback layout (capacity 39, or 17).
@pytest.mark.parametrize("filled", [(), (7,), (8,), (5, 1, 1, 1, 1), (30, 1, 1, 12, 1)], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_goes_on_bit_equal(model: Any, mix: str, filled: tuple[int, ...], tmp_path: Path) -> None:
    caches = make_cache(model, **MIXES[mix])
    for length in filled:
        mx.eval(model(toys.tokens(1, length), cache=caches))
    save_cache(tmp_path / "ours.safetensors", caches, model)
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "plain.safetensors"), caches)
    loaded = [
        load_cache(tmp_path / "ours.safetensors", model, **MIXES[mix]),
        load_cache(tmp_path / "plain", model, **MIXES[mix]),
        mlx_lm_cache.load_prompt_cache(str(tmp_path / "plain.safetensors")),
        mlx_lm_cache.load_prompt_cache(str(tmp_path / "ours.safetensors")),
    ]
    for other in loaded:
        assert_same(_tuples([one.state for one in other]), _tuples([one.state for one in caches]), "state")
    for length in (1, 3, 20, 1):
        logits = model(toys.tokens(1, length, seed=length), cache=caches)
        for other in loaded:
            assert_same(model(toys.tokens(1, length, seed=length), cache=other), logits, "logits")
        if "rollback" in mix and length == 3:
            for other in (caches, *loaded):
                assert mlx_lm_cache.trim_prompt_cache(other, 2) == 2
    for other in loaded[:2]:
        assert [type(one) for one in other] == [type(one) for one in caches]


def _tuples(state: Any) -> Any:
    return tuple(map(_tuples, state)) if isinstance(state, (list, tuple)) else state


def test_rollback_right_after_loading(model: Any, tmp_path: Path) -> None:
    """The state holds `depth` rows more than the window, so a loaded cache rolls back as far as a fresh one."""
    caches, ids = make_cache(model, EIGHT, rollback=True, depth=4), toys.tokens(1, 60)
    mx.eval(model(ids[:, :41], cache=caches))
    save_cache(tmp_path / "clean", caches, model)
    mx.eval(model(ids[:, 41:45], cache=caches))
    save_cache(tmp_path / "cache", caches, model)
    clean, loaded = (load_cache(tmp_path / name, model, EIGHT, rollback=True, depth=4) for name in ("clean", "cache"))
    assert mlx_lm_cache.trim_prompt_cache(loaded, 4) == 4
    for length in (1, 2, 7, 1):
        found, expected = (model(ids[:, 41 : 41 + length], cache=one) for one in (loaded, clean))
        assert_same(found, expected, "logits")


def test_saved_rings_are_plain_mlx_lms(model: Any, tmp_path: Path) -> None:
    """Caches without quantization or rollback stay loadable where straightline is not installed."""
    caches = make_cache(model)
    mx.eval(model(toys.tokens(1, 12), cache=caches))
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    kinds = {type(one) for one in mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))}
    assert kinds == {mlx_lm_cache.RotatingKVCache, mlx_lm_cache.KVCache}
    assert {type(one) for one in load_cache(tmp_path / "cache", model)} == {RotatingKVCache, KVCache}


def test_metadata_of_the_user_is_kept(model: Any, tmp_path: Path) -> None:
    save_cache(tmp_path / "cache", make_cache(model), model, {"note": "hello"})
    _, metadata = mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
    assert metadata["note"] == "hello"


def test_another_model_is_refused(tmp_path: Path) -> None:
    first, second = toys.build(toys.D6), toys.build(toys.config(rms_norm_eps=1e-5))
    save_cache(tmp_path / "cache", make_cache(first), first)
    with pytest.raises(
        StraightlineError,
        match=r"^cache.safetensors holds the caches of a model with the fingerprint [0-9a-f]{16}, but this one has "
        r"[0-9a-f]{16}; compute the prompt again with this model$",
    ):
        load_cache(tmp_path / "cache", second)
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "plain.safetensors"), make_cache(toys.build(toys.E6)))
    with pytest.raises(StraightlineError) as refused:
        load_cache(tmp_path / "plain", first)
    assert str(refused.value) == "plain.safetensors holds 3 caches; expected 6, one for each owner"


def test_another_kv_config_is_refused(model: Any, tmp_path: Path) -> None:
    save_cache(tmp_path / "cache", make_cache(model, EIGHT), model)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "RotatingKVCache(max_size=8)"),
        ({"kv_config": MIXED}, "QuantizedRingCache(bits=3, group_size=32, max_size=8)"),
        (
            {"kv_config": EIGHT, "rollback": True},
            "QuantizedRollbackCache(bits=8, group_size=64, window=8, depth=16)",
        ),
    ]
    for arguments, expected in wrong:
        with pytest.raises(StraightlineError) as refused:
            load_cache(tmp_path / "cache", model, **arguments)
        assert str(refused.value) == (
            "cache.safetensors: cache 0 is QuantizedRingCache(bits=8, group_size=64, max_size=8); expected "
            f"{expected}, by the kv_config, rollback and depth that load_cache was called with"
        )


def test_no_such_file_and_not_a_cache(model: Any, tmp_path: Path) -> None:
    with pytest.raises(StraightlineError, match=r"^absent.safetensors cannot be loaded"):
        load_cache(tmp_path / "absent", model)
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.zeros((2,))})
    with pytest.raises(StraightlineError, match=r"^weights.safetensors cannot be loaded .*made by save_cache$"):
        load_cache(tmp_path / "weights", model)


def test_names_of_mlx_lm_are_never_replaced() -> None:
    taken = type("KVCache", (), {})
    with pytest.raises(ImportError, match=r"mlx_lm\.models\.cache has its own KVCache"):
        register(taken)
    assert mlx_lm_cache.KVCache is not taken
