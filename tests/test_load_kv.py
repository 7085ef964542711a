"""load(kv_config=, kv_bits=): the caches that the model then makes, and wishes that are refused by name."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import pytest
import toys
from mlx_lm.models.cache import make_prompt_cache

from straightline.runtime import StraightlineError, load, make_cache, specialize
from straightline.runtime.kv.device import packing

ENTRIES = [{"layer_idx": 0, "bits": 8, "group_size": 64}, {"layer_idx": 2, "bits": 4, "group_size": 32}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv")
    checkpoints.publish(path, toys.E6)
    (path / "kv_config.json").write_text(json.dumps(ENTRIES))
    return path


def stored(caches: list[Any]) -> list[tuple[str, int | None, int | None]]:
    return [(type(one).__name__, *packing(one)) for one in caches]


WANTED = [("QuantizedRingCache", 8, 64), ("RotatingKVCache", None, None), ("QuantizedGrowingCache", 4, 32)]


@pytest.mark.parametrize("kv_config", ["auto", ENTRIES])
def test_the_caches_that_a_model_makes(folder: Path, kv_config: Any) -> None:
    model, _ = load(folder, kv_config=kv_config)
    assert stored(model.make_cache()) == WANTED
    assert stored(make_prompt_cache(model)) == WANTED
    assert stored(make_cache(model)) == WANTED
    assert stored(copy.deepcopy(model).make_cache()) == WANTED
    assert stored(pickle.loads(pickle.dumps(model)).make_cache()) == WANTED
    assert stored(specialize(model).make_cache()) == WANTED
    assert stored(make_cache(model, rollback=True)) == [
        ("QuantizedRollbackCache", 8, 64),
        ("SlidingRollbackCache", None, None),
        ("QuantizedGrowingCache", 4, 32),
    ]
    assert stored(make_cache(model, [])) == [
        ("RotatingKVCache", None, None),
        ("RotatingKVCache", None, None),
        ("KVCache", None, None),
    ]
    ids = toys.tokens(1, 12)
    assert mx.array_equal(model(ids, cache=model.make_cache()), model(ids, cache=make_cache(model, ENTRIES))).item()


def test_without_a_wish_or_a_file_they_are_plain(folder: Path, tmp_path: Path) -> None:
    model, _ = load(folder)
    assert stored(model.make_cache())[0] == ("RotatingKVCache", None, None)
    checkpoints.publish(tmp_path, toys.D6)
    model, _ = load(tmp_path, kv_config="auto")
    assert stored(model.make_cache())[0] == ("RotatingKVCache", None, None)


def test_one_number_of_bits(folder: Path) -> None:
    model, _ = load(folder, kv_bits=8)
    assert [packing(one) for one in model.make_cache()] == [(8, 64)] * 3
    model, _ = load(folder, kv_bits=4, kv_group_size=32, keep_last_full=True)
    assert [packing(one)[0] for one in model.make_cache()] == [4, 4, None]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"kv_config": "other"}, "kv_config is 'other'; expected \"auto\", a list of entries, or None"),
        ({"kv_config": "auto", "kv_bits": 8}, "kv_bits and kv_config are both given; expected one of them only"),
        ({"keep_last_full": True}, "keep_last_full goes with kv_bits; a kv_config says itself what stays plain"),
        (
            {"kv_bits": 5},
            "kv_bits is 5 and kv_group_size 64; expected one of 2, 3, 4, 6, 8 bits in groups of 32, 64, 128",
        ),
        (
            {"kv_bits": 8, "kv_group_size": 128},
            "FOLDER: kv_bits: [0].group_size is 128; expected a divisor of the 64 numbers of a head in layer 0",
        ),
        (
            {"kv_config": [{"layer_idx": 4, "bits": 8, "group_size": 64}]},
            "FOLDER: kv_config.json: [0].layer_idx is 4; expected a layer that owns a cache: "
            "layer 4 reads that of layer 1, so list 1",
        ),
    ],
)
def test_wishes_that_cannot_be_granted(folder: Path, wish: dict[str, Any], message: str) -> None:
    with pytest.raises(StraightlineError) as raised:
        load(folder, **wish)
    assert str(raised.value) == message.replace("FOLDER", str(folder))


def test_a_bad_file_of_the_checkpoint_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(toys.nested(toys.E6)))
    (tmp_path / "kv_config.json").write_text('[{"layer_idx": 0, "bits": 7, "group_size": 64}]')
    with pytest.raises(StraightlineError) as raised:
        load(tmp_path, kv_config="auto")
    assert str(raised.value) == f"{tmp_path}: kv_config.json: [0].bits is 7; expected 0, 2, 3, 4, 6 or 8"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"kv_bits": 5}, "kv_bits is 5 and kv_group_size 64; expected one of "),
        ({"kv_bits": 8, "kv_config": "auto"}, "kv_bits and kv_config are both given"),
        ({"keep_last_full": True}, "keep_last_full goes with kv_bits"),
        ({"tier": "fastest"}, "tier is 'fastest'"),
    ],
)
def test_what_no_checkpoint_could_fit_is_refused_before_the_download(
    wish: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("straightline.runtime.loading.find_folder", lambda name, revision: asked.append(name))
    with pytest.raises(StraightlineError, match=f"^{re.escape(message)}"):
        load("owner/name", **wish)
    assert not asked
