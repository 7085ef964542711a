"""A long prompt is handed to the device a few layers at a time: the same bytes, and no layer computed for nothing."""

from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import assert_same, assert_same_caches
from pairs import four_bit

from straightline.runtime import HiddenTap, make_cache, pace


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every prompt is long. What was started."""
    found: list[Any] = []
    monkeypatch.setattr(pace, "long", lambda tokens: tokens > 1)
    start = pace.start
    monkeypatch.setattr(pace, "start", lambda rows: found.append(rows) or start(rows))
    return found


@pytest.mark.parametrize("shape", sorted(toys.SHAPES))
def test_the_same_bytes(shape: str, started: list[Any]) -> None:
    pair = four_bit(toys.SHAPES[shape])
    taps = range(-1, len(pair.plain.layers) + 1)
    mine, plain, other = pair.model.make_cache(), pair.plain.make_cache(), pair.model.make_cache()
    for call, length in enumerate((20, 7, 1)):
        ids = toys.tokens(1, length, pair.plain.args.vocab_size, call)
        ours, theirs = HiddenTap(taps), HiddenTap(taps)
        assert_same(pair.model(ids, cache=mine, tap=ours), pair.plain(ids, cache=plain), f"logits of call {call}")
        pair.model.monolith(ids, other, tap=theirs)
        assert_same(dict(sorted(ours.captured.items())), dict(sorted(theirs.captured.items())), f"taps of call {call}")
    assert_same_caches(mine, plain)
    assert started


@pytest.mark.parametrize("every_layer", [False, True])
def test_layers_without_a_cache_are_left_to_whoever_asks(every_layer: bool, started: list[Any]) -> None:
    """mlx-lm reads a prompt's chunks for the caches alone; for speculation with stand-ins in the list."""
    pair = four_bit(toys.SHAPES["e4b"])
    owners = len(pair.model.make_cache())
    assert owners < len(pair.model.layers)
    caches = make_cache(pair.model, rollback=every_layer, every_layer=every_layer)
    pair.model(toys.tokens(1, 20, pair.plain.args.vocab_size), cache=caches)
    assert len(started) == (owners - 1) // pace.EVERY


def test_inside_mx_compile_nothing_is_started(started: list[Any]) -> None:
    pair = four_bit(toys.SHAPES["12b"])
    ids = toys.tokens(1, 9, pair.plain.args.vocab_size)
    call = mx.compile(lambda ids: pair.model(ids, cache=pair.model.make_cache()))
    assert_same(call(ids), pair.plain(ids, cache=pair.plain.make_cache()), "logits")


def test_only_long_prompts_on_cuda() -> None:
    assert not pace.long(1 << 20)  # on this CPU
