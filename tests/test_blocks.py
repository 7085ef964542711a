"""Blocks of a few tokens, and batches, through the functions of `decode`: run on the CPU here, where they never pay."""

import gc
import io
import weakref
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import FOUR_BIT, assert_same, assert_same_caches, file_of, mixed
from pairs import Pair, four_bit, pair

from straightline.runtime import HiddenTap, blocks, make_cache, specialize
from straightline.runtime.weights import expert_linear


@pytest.fixture(params=("fused", "written out"))
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Blocks serve as if something had a kernel; attention as MLX's own, and as on a GPU that has none."""
    made = blocks.Blocks.__init__

    def init(self: Any, file: Any, calls: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "stands_in", lambda call, site: request.param == "written out")
            made(self, file, calls)
        self.pays = True

    monkeypatch.setattr(blocks.Blocks, "__init__", init)
    return str(request.param)


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many calls from now on take blocks, and which are compared first."""
    counts: Counter[str] = Counter()
    begin = blocks.Blocks.begin

    def counting(self: Any, shape: tuple[int, int], caches: list[Any]) -> Any:
        counts[f"{shape[0]} by {shape[1]}"] += 1
        return begin(self, shape, caches)

    monkeypatch.setattr(blocks.Blocks, "begin", counting)
    return counts


@pytest.mark.parametrize("shape", sorted(toys.SHAPES))
def test_blocks_of_one_sequence(shape: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the window, across it and past it; single tokens between them. In all their layers."""
    pair = four_bit(toys.SHAPES[shape])
    counts = counted(pair.model, monkeypatch)
    mine, plain = pair.model.make_cache(), pair.plain.make_cache()
    vocab = pair.plain.args.vocab_size
    for call, length in enumerate((3, 3, 3, 1, 4, 4, 2, 2, 2, 1, 1, 32, 32, 7)):
        ids = toys.tokens(1, length, vocab, call)
        assert_same(pair.model(ids, cache=mine), pair.plain(ids, cache=plain), f"logits of call {call}")
    assert_same_caches(mine, plain)
    # Before the second of a width, two steps are compared.
    assert counts == {"1 by 3": 4, "1 by 4": 3, "1 by 2": 4, "1 by 32": 3}
    assert pair.model.dispatch.block_reason == ""


@pytest.mark.parametrize("shape", sorted(toys.SHORT))
def test_taps_are_those_of_forward(shape: str, attention: str) -> None:
    pair = four_bit(toys.SHORT[shape])
    taps = range(-1, len(pair.plain.layers) + 1)
    mine, other = pair.model.make_cache(), pair.model.make_cache()
    for call in range(4):
        ids = toys.tokens(1, 5, pair.plain.args.vocab_size, call)
        ours, theirs = HiddenTap(taps), HiddenTap(taps)
        pair.model(ids, cache=mine, tap=ours)
        pair.model.monolith(ids, other, tap=theirs)
        assert_same(dict(sorted(ours.captured.items())), dict(sorted(theirs.captured.items())), f"taps of call {call}")


@pytest.mark.parametrize("shape", sorted(toys.SHORT))
def test_several_sequences_in_plain_caches(shape: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = four_bit(toys.SHORT[shape])
    counts = counted(pair.model, monkeypatch)
    mine, plain = pair.model.make_cache(), pair.plain.make_cache()
    for call, length in enumerate((5, 1, 1, 1, 3, 3, 3, 1)):
        ids = toys.tokens(3, length, pair.plain.args.vocab_size, call)
        assert_same(pair.model(ids, cache=mine), pair.plain(ids, cache=plain), f"logits of call {call}")
    assert_same_caches(mine, plain)
    assert counts == {"3 by 1": 5, "3 by 3": 4}


def padded(pair: Pair, lengths: tuple[int, ...], model: Any) -> list[Any]:
    """Batch caches of prompts of these lengths."""
    rows = []
    for row, length in enumerate(lengths):
        rows.append(model.make_cache())
        mx.eval(model(toys.tokens(1, length, pair.plain.args.vocab_size, row), cache=rows[-1]))
    return [one[0].merge(list(one)) for one in zip(*rows, strict=True)]


@pytest.mark.parametrize("shape", sorted(toys.SHORT))
def test_a_padded_batch(shape: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As mlx-lm's server has it, past the window, with rows that leave and others that join."""
    pair = four_bit(toys.SHORT[shape])
    sides = (pair.model, pair.plain)
    both = [padded(pair, (3, 9, 21), side) for side in sides]
    counts = counted(pair.model, monkeypatch)
    vocab = pair.plain.args.vocab_size

    def step(rows: int, length: int, seed: int) -> None:
        ids = toys.tokens(rows, length, vocab, seed)
        ours, theirs = (side(ids, cache=caches) for side, caches in zip(sides, both, strict=True))
        assert_same(ours, theirs, f"logits of step {seed}")

    for seed in range(12):
        step(3, 1, seed)
    assert counts == {"3 by 1": 11 + 2}
    for caches in both:
        for cache in caches:
            cache.filter(mx.array([0, 2]))
    for seed in range(12, 18):
        step(2, 1, seed)
    assert counts == {"3 by 1": 13, "2 by 1": 5 + 2}
    for caches, more in zip(both, (padded(pair, (6,), side) for side in sides), strict=True):
        for cache, other in zip(caches, more, strict=True):
            cache.extend(other)
    for seed in range(18, 24):
        step(3, 1, seed)
    step(3, 2, 24)
    step(3, 2, 25)
    assert counts == {"3 by 1": 13 + 6, "2 by 1": 7}
    assert_same_caches(*both)


@pytest.mark.parametrize("shape", ("12b", "e4b"))
def test_batch_caches_that_are_not_at_one_position(shape: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes its own offsets, as in mlx-lm; layers that share K/V those of their source, before it."""
    pair = four_bit(toys.SHORT[shape])
    both = [padded(pair, (3, 9), side) for side in (pair.model, pair.plain)]
    counts = counted(pair.model, monkeypatch)
    for seed in range(8):
        for caches in both if seed == 3 else ():
            caches[1].offset = caches[1].offset + 1
            caches[-1].offset += 2  # the same Python object
        ids = toys.tokens(2, 1, pair.plain.args.vocab_size, seed)
        assert_same(pair.model(ids, cache=both[0]), pair.plain(ids, cache=both[1]), f"logits of step {seed}")
    assert_same_caches(*both)
    assert counts == {"2 by 1": 7 + 2}


def test_batch_caches_hold_what_mlx_lm_left_in_them(attention: str) -> None:
    """No attribute more, and no step that waits to be evaluated, however many there were."""
    pair = four_bit(toys.SHORT["12b"])
    both = [padded(pair, (3, 9), side) for side in (pair.model, pair.plain)]
    for seed in range(20):
        ids = toys.tokens(2, 1, pair.plain.args.vocab_size, seed)
        mx.eval(pair.model(ids, cache=both[0]), pair.plain(ids, cache=both[1]))
    for mine, other in zip(*both, strict=True):
        assert vars(mine).keys() == vars(other).keys()
        assert waiting(mine.offset) == waiting(other.offset)


def waiting(array: mx.array) -> int:
    """Primitives that are not evaluated yet."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return text.getvalue().count("label")


def test_caches_for_every_layer(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for layers that share K/V have no position."""
    pair = four_bit(toys.SHORT["e4b"])
    counts = counted(pair.model, monkeypatch)
    mine, other = (make_cache(pair.model, rollback=True, every_layer=every) for every in (True, False))
    for call in range(3):
        ids = toys.tokens(1, 4, pair.plain.args.vocab_size, call)
        assert_same(pair.model(ids, cache=mine), pair.model.monolith(ids, other), f"logits of call {call}")
    assert counts == {"1 by 4": 2 + 2}


def test_a_cache_that_is_there_twice(attention: str) -> None:
    """Its second layer comes a block later, as in mlx-lm."""
    pair = four_bit(toys.SHORT["12b"])
    for call in range(3):
        mine, plain = pair.model.make_cache(), pair.plain.make_cache()
        for caches in (mine, plain) if call == 2 else ():
            caches[5] = caches[2]
        ids = toys.tokens(1, 3, pair.plain.args.vocab_size, call)
        assert_same(pair.model(ids, cache=mine), pair.plain(ids, cache=plain), f"logits of call {call}")
        assert_same_caches(mine, plain)


def test_rings_unlike_in_size(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask in a word, for as many rows as each holds."""
    pair = four_bit(toys.SHORT["12b"])
    counts = counted(pair.model, monkeypatch)
    mine, plain = pair.model.make_cache(), pair.plain.make_cache()
    for caches in (mine, plain):
        caches[0].max_size, caches[1].max_size = 16, 4
    for call in range(2):
        ids = toys.tokens(1, 4, pair.plain.args.vocab_size, call)
        assert_same(pair.model(ids, cache=mine), pair.plain(ids, cache=plain), f"logits of call {call}")
    assert_same_caches(mine, plain)
    assert counts == {"1 by 4": 1 + 2}


def test_with_rollback(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft is verified: a block, some of it taken back, a block."""
    pair = four_bit(toys.SHORT["e4b"])
    counts = counted(pair.model, monkeypatch)
    mine, other = make_cache(pair.model, rollback=True), make_cache(pair.model, rollback=True)
    for call in range(9):
        ids = toys.tokens(1, 4, pair.plain.args.vocab_size, call)
        assert_same(pair.model(ids, cache=mine), pair.model.monolith(ids, other), f"logits of call {call}")
        for cache in (*mine, *other):
            cache.trim(call % 4)
    assert counts == {"1 by 4": 8 + 2}


def test_what_takes_forward(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits, no caches, long blocks, caches at several positions."""
    pair = four_bit(toys.SHORT["12b"])
    counts = counted(pair.model, monkeypatch)
    vocab = pair.plain.args.vocab_size
    caches, odd = pair.model.make_cache(), pair.model.make_cache()
    mx.eval(pair.model(toys.tokens(1, 4, vocab), cache=odd))
    odd[2].trim(1)
    for call in range(3):
        ids = toys.tokens(1, 4, vocab, call)
        pair.model(ids, cache=caches, tap=HiddenTap([1], edit=lambda index, rows: rows))
        pair.model(ids)
        pair.model(ids, cache=odd)
        pair.model(toys.tokens(1, blocks.MOST + 1, vocab), cache=pair.model.make_cache())
    assert not counts


def test_a_block_that_is_not_exact_is_refused_for_its_shape_alone(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = four_bit(toys.SHORT["12b"])
    begin = blocks.Blocks.begin

    def wrong(self: Any, shape: tuple[int, int], caches: list[Any]) -> Any:
        calls = begin(self, shape, caches)
        if shape == (1, 3):
            right = calls.layer_end
            calls.layer_end = lambda *inputs: tuple(one * 1.5 for one in right(*inputs))
        return calls

    monkeypatch.setattr(blocks.Blocks, "begin", wrong)
    caches, plain = pair.model.make_cache(), pair.plain.make_cache()
    for call, length in enumerate((3, 3, 3, 2, 2, 2)):
        ids = toys.tokens(1, length, pair.plain.args.vocab_size, call)
        assert_same(pair.model(ids, cache=caches), pair.plain(ids, cache=plain), f"logits of call {call}")
    reason = "1 by 3 tokens: its logits differ from those of forward at step 0: at flat index 0 ("
    assert pair.model.dispatch.block_reason.startswith(reason)
    counts = counted(pair.model, monkeypatch)
    for side in (pair.model, pair.plain):
        side.layers[0].layer_scalar = mx.array([0.5])
    caches, plain = pair.model.make_cache(), pair.plain.make_cache()
    for call in range(3):  # nor asked again with other weights
        ids = toys.tokens(1, 3, pair.plain.args.vocab_size, call)
        assert_same(pair.model(ids, cache=caches), pair.plain(ids, cache=plain), f"logits of call {call}")
    assert pair.model.dispatch.block_reason.startswith(reason) and not counts
    assert {whole[:2] for *_, whole in pair.model._bound.blocks_checked} == {(1, 2)}


def test_new_weights_of_the_same_form_are_not_compared_again(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = four_bit(toys.SHORT["12b"])
    vocab = pair.plain.args.vocab_size
    caches = pair.model.make_cache()
    for call in range(3):
        pair.model(toys.tokens(1, 3, vocab, call), cache=caches)
    counts = counted(pair.model, monkeypatch)
    for side in (pair.model, pair.plain):
        side.layers[0].layer_scalar = mx.array([0.5])
    caches, plain = pair.model.make_cache(), pair.plain.make_cache()
    for call in range(3):
        ids = toys.tokens(1, 3, vocab, call)
        assert_same(pair.model(ids, cache=caches), pair.plain(ids, cache=plain), f"logits of call {call}")
    assert counts == {"1 by 3": 2}


def test_projections_that_stay_apart(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other bits: their results are put side by side."""
    mixture = pair(toys.SHORT["12b"], quantize=mixed)
    counts = counted(mixture.model, monkeypatch)
    mixture.agree(lengths=(3, 3, 3, 2, 2))
    assert counts == {"1 by 3": 4, "1 by 2": 3}


@pytest.mark.parametrize("name", ["layer_scalar", "norm"])
def test_one_parameter_of_another_dtype(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where it stands on the stream, and the scores, have another dtype too."""
    mixture = pair(toys.SHORT["12b"], dtype=mx.bfloat16)
    for side in (mixture.model, mixture.plain):
        if name == "norm":
            side.layers[2].input_layernorm.weight = side.layers[2].input_layernorm.weight.astype(mx.float32)
        else:
            side.layers[2].layer_scalar = side.layers[2].layer_scalar.astype(mx.float32)
    counts = counted(mixture.model, monkeypatch)
    mixture.agree(lengths=(3, 3, 3, 2, 2))
    assert counts == {"1 by 3": 4, "1 by 2": 3}, mixture.model.dispatch.block_reason


def test_inside_mx_compile_forward_serves(attention: str) -> None:
    pair = four_bit(toys.SHORT["12b"])
    ids = toys.tokens(1, 3, pair.plain.args.vocab_size)
    call = mx.compile(lambda ids: pair.model(ids, cache=pair.model.make_cache()))
    for _ in range(3):
        assert_same(call(ids), pair.plain(ids, cache=pair.plain.make_cache()), "logits")


def test_on_this_cpu_they_do_not_pay() -> None:
    model = specialize(toys.build(toys.D6), file_of(toys.D6), strict=True)
    assert [route.blocks for route in model._bound.routes] == [None]
    assert model.dispatch.block_reason == "no fused site is other than MLX's own operations here"


def test_weights_that_changed_are_let_go_of_at_once() -> None:
    """Not when Python looks for cycles next: joined ones are there twice until then."""
    model = four_bit(toys.SHORT["e4b"]).model
    gc.collect()
    gc.disable()
    try:
        model._bound.weights.held = HiddenTap([0])
        held = weakref.ref(model._bound.weights.held)
        model.layers[0].layer_scalar = mx.array([0.5])
        mx.eval(model(toys.tokens(1, 3)))
        assert held() is None
    finally:
        gc.enable()


def test_rows_of_experts_are_evaluated_before_another_thread_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that evaluate one array at a time crash in MLX. Here the other comes while the first evaluates."""
    module = toys.build(toys.M6, quantize=FOUR_BIT).layers[0].experts.switch_glu.gate_proj
    call = expert_linear(module, is_down=False)
    x, chosen = mx.ones((1, 3, 1, 1, 64)), mx.zeros((1, 3, 2), mx.uint32)
    evaluated = mx.eval
    made: list[mx.array] = []

    def evaluate(rows: mx.array) -> None:
        made.append(rows)
        if len(made) == 1:
            call(x, chosen)
        evaluated(rows)

    monkeypatch.setattr(mx, "eval", evaluate)
    call(x, chosen)
    assert [one.tolist() for one in made] == [[[[0, 0], [1, 1], [2, 2]]]] * 2
