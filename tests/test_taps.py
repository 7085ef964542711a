"""B62: taps: the stream after each layer, the scaled embedding, the final norm; equal to hooks on plain mlx-lm."""

import io
import random
import weakref
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import BFLOAT16, FLOAT16, FOUR_BIT, Case, Trio, assert_same
from memory import settled

from straightline.runtime import HiddenTap, StraightlineError

SHAPED = pytest.mark.parametrize("config", [toys.D6, toys.M6, toys.E6], ids=["D6", "M6", "E6"])


@SHAPED
@pytest.mark.parametrize("taps", [[0, 2, 5], [6], [-1], [], [5, 0, 6, -1], [4, 3], list(range(-1, 7))], ids=str)
def test_any_subset_in_any_order(config: dict[str, Any], taps: list[int]) -> None:
    """Prefill, a block, steps past the wrap; the tap object keeps the latest call only. Trio does the comparison."""
    case = Case(config)
    trio = Trio(case)
    for length in (5, 3, 1, 1, 9, 1):
        trio(case.tokens(2, length), taps)
    assert case.model.dispatch.counts == {"generated": 6, "monolith": 0}


def test_random_subsets_in_every_dtype() -> None:
    draw = random.Random(2)
    for dtype, quantize, outer in ((BFLOAT16, FOUR_BIT, True), (FLOAT16, None, False), (mx.float32, FOUR_BIT, True)):
        case = Case(toys.E6, dtype=dtype, quantize=quantize, outer=outer)
        for batch in (1, 3):
            trio = Trio(case)
            for length in (2, 7, 1):
                taps = draw.sample(list(case.everything), draw.randint(1, 8))
                trio(case.tokens(batch, length), taps, draw.choice([None, -1, 0, length - 1]))


@pytest.mark.parametrize("position", [0, 1, 4, -1, -2, -5])
def test_position(position: int) -> None:
    """One row [B, 1, hidden], counted from either end, the same bytes as that row of a whole tap."""
    case = Case(toys.E6, dtype=BFLOAT16)
    ids = case.tokens(3, 5)
    Trio(case)(ids, position=position)
    tap = HiddenTap(case.everything, position=position)
    case.model(ids, tap=tap)
    case.plain(ids)
    for index in case.everything:
        assert tap.captured[index].shape == (3, 1, 64)
        assert_same(tap.captured[index], case.plain.rows[index][:, [position]], f"tap {index}")


def test_position_in_decode() -> None:
    case = Case(toys.D6)
    trio = Trio(case)
    trio(case.tokens(2, 6), [0, 6], -1)
    trio(case.tokens(2, 1), [0, 6], -1)
    trio(case.tokens(2, 1), [0, 6], 0)


@pytest.mark.parametrize("path", ["generated", "monolith"])
@pytest.mark.parametrize(
    ("taps", "position", "length", "message"),
    [
        ([0, 7], None, 4, "HiddenTap: layers has 7; expected -1 to 6 (6 is after the final norm)"),
        ([99, 7], None, 4, "HiddenTap: layers has 7; expected -1 to 6 (6 is after the final norm)"),
        ([0], 4, 4, "HiddenTap: position is 4, but the call has 4 tokens; expected -4 to 3"),
        ([0], -5, 4, "HiddenTap: position is -5, but the call has 4 tokens; expected -4 to 3"),
        ([0], 1, 1, "HiddenTap: position is 1, but the call has 1 tokens; expected -1 to 0"),
    ],
)
def test_refused_by_the_call(path: str, taps: list[int], position: int | None, length: int, message: str) -> None:
    """Refused before anything runs: caches, counts and the rows of an earlier call stay as they were."""
    case = Case(toys.D6)
    caches = case.model.make_cache()
    tap = HiddenTap(taps, position=position)
    tap.captured = {0: mx.array(1.0)}
    call = case.model if path == "generated" else case.model.monolith
    with pytest.raises(StraightlineError) as error:
        call(case.tokens(1, length), cache=caches, tap=tap)
    assert str(error.value) == message
    assert all(cache.offset == 0 and cache.keys is None for cache in caches)
    assert case.model.dispatch.counts == {"generated": 0, "monolith": 0}
    assert list(tap.captured) == [0]


@pytest.mark.parametrize(
    ("taps", "position", "message"),
    [
        ([0, 3, 0], None, "HiddenTap: layers has 0 more than once; expected each index once"),
        ([5, 3, 5, 3], None, "HiddenTap: layers has 3 more than once; expected each index once"),
        ([-1, -1], None, "HiddenTap: layers has -1 more than once; expected each index once"),
        ([0, -2], None, "HiddenTap: layers has -2; expected integers from -1"),
        ([True], None, "HiddenTap: layers has True; expected integers from -1"),
        ([1.0], None, "HiddenTap: layers has 1.0; expected integers from -1"),
        (["3"], None, "HiddenTap: layers has '3'; expected integers from -1"),
        ([0], 1.0, "HiddenTap: position is 1.0; expected an integer or None"),
        ([0], True, "HiddenTap: position is True; expected an integer or None"),
        (5, None, "HiddenTap: layers is 5; expected a list of integers from -1"),
    ],
)
def test_refused_at_once(taps: Any, position: Any, message: str) -> None:
    with pytest.raises(StraightlineError) as error:
        HiddenTap(taps, position=position)
    assert str(error.value) == message


def test_other_things_in_the_place_of_a_tap() -> None:
    case = Case(toys.D6)
    with pytest.raises(StraightlineError, match=r"^tap is a list; expected a HiddenTap or None$"):
        case.model(case.tokens(1, 3), tap=[5])
    with pytest.raises(StraightlineError, match=r"^HiddenTap: edit is 5; expected a function of an index and rows"):
        HiddenTap([0], edit=5)  # type: ignore[arg-type]


def test_a_tap_changes_nothing() -> None:
    """Same logits and caches with and without; the same path."""
    case = Case(toys.E6, dtype=BFLOAT16, quantize=FOUR_BIT)
    tapped, bare = case.model.make_cache(), case.model.make_cache()
    for length in (7, 1, 4, 1):
        ids = case.tokens(1, length)
        found = case.model(ids, cache=tapped, tap=HiddenTap(case.everything))
        assert case.model.dispatch.last == ("generated", "")
        assert_same(found, case.model(ids, cache=bare), "logits")
    assert_same([vars(one) for one in tapped], [vars(one) for one in bare], "caches")
    assert case.model.dispatch.counts == {"generated": 8, "monolith": 0}


def test_rows_are_by_reference_and_evaluated_with_the_logits() -> None:
    """The sentinel's row is the very array that the head reads; a tap costs no copy."""
    case = Case(toys.D6)
    tap = HiddenTap([6])
    seen = []
    weights = case.model._bound.weights
    head = weights.unembed
    weights.unembed = lambda h: seen.append(h) or head(h)
    case.model(case.tokens(1, 3), tap=tap)
    assert tap.captured[6] is seen[0]


class Stream:
    """Wraps a forward's tap: remembers every row weakly, as whoever keeps one would be seen."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, index: int, value: Any) -> Any:
        self.rows.append(weakref.ref(value))
        return value


@pytest.mark.usefixtures("exact_memory")
def test_no_tap_keeps_nothing_alive() -> None:
    """After a call without a tap no layer's row lives on; after one with a tap only the tapped rows do."""
    case = Case(toys.D6)
    bound = case.model._bound
    ids = case.tokens(1, 5)
    caches = case.model.make_cache()
    case.model(ids, cache=caches, tap=HiddenTap([1]))
    before = active_after(lambda: None)
    held = active_after(lambda: mx.eval(case.model(ids)))
    assert held <= before
    tap = HiddenTap([1, 4])
    held = active_after(lambda: mx.eval(case.model(ids, tap=tap), tap.captured))
    assert before < held
    assert sum(row.nbytes for row in tap.captured.values()) == 2 * 5 * 64 * 4
    tap.captured = {}
    assert active_after(lambda: None) <= before
    assert bound is case.model._bound


def active_after(call: Any) -> int:
    """Bytes held by MLX arrays once the call is done and its result dropped."""
    call()
    return settled()


def test_chunked_rows_are_those_of_one_pass() -> None:
    """Tap i of a chunk is the stream at the chunk's positions: joined, the chunks' rows are one pass's.

    Close, not equal: other matmul shapes. Bits are compared with mlx-lm at the same schedule.
    """
    case = Case(toys.D6)
    ids = case.tokens(2, 20)
    trio = Trio(case)
    parts = []
    for start, stop in ((0, 7), (7, 16), (16, 20)):
        trio(ids[:, start:stop])
        parts.append(dict(case.plain.rows))
    Trio(case)(ids)
    for index in case.everything:
        joined = mx.concatenate([part[index] for part in parts], axis=1)
        assert mx.allclose(joined, case.plain.rows[index], rtol=1e-3, atol=1e-3).item(), index


def test_the_convention() -> None:
    """-1 is embed * sqrt(hidden); n is the norm of n - 1 and what the head reads; nothing is named twice."""
    case = Case(toys.config(final_logit_softcapping=None))
    ids = case.tokens(1, 4)
    tap = HiddenTap([6, -1, 5])
    logits = case.model(ids, tap=tap)
    inner = case.model.model
    assert_same(tap.captured[-1], inner.embed_tokens(ids) * 8.0, "embedding")
    assert_same(tap.captured[6], mx.fast.rms_norm(tap.captured[5], inner.norm.weight, 1e-6), "sentinel")
    assert_same(logits, inner.embed_tokens.as_linear(tap.captured[6]), "logits")


@pytest.mark.usefixtures("exact_memory")
def test_one_position_of_a_long_prompt_holds_one_row() -> None:
    """The bytes of a whole tap's row, without the rows of all tokens behind it; inside mx.compile as well."""
    case = Case(toys.D6)
    ids = case.tokens(1, 600)
    whole = HiddenTap([2, 6])
    case.model(ids, tap=whole)
    expected = {index: rows[:, 7:8] for index, rows in whole.captured.items()}
    mx.eval(expected)
    before = active_after(whole.captured.clear)
    tap = HiddenTap([2, 6], position=7)
    held = active_after(lambda: mx.eval(case.model(ids, tap=tap), tap.captured)) - before
    assert_same(tap.captured, expected, "rows")
    assert held <= 2 * (64 * 4 + 16384)

    def traced(ids: mx.array) -> mx.array:
        tap = HiddenTap([2], position=7)
        case.model(ids, tap=tap)
        return tap.captured[2]

    assert mx.allclose(mx.compile(traced)(ids), expected[2], rtol=1e-4, atol=1e-4).item()


@pytest.mark.parametrize("length", [1, 4])
def test_taps_add_no_primitive(length: int) -> None:
    case = Case(toys.E6)

    def primitives(tap: HiddenTap | None, path: Any) -> int:
        caches = case.model.make_cache()
        mx.eval(case.model(case.tokens(1, 3), cache=caches), [one.state for one in caches])
        logits = path(case.tokens(1, length), cache=caches, tap=tap)
        text = io.StringIO()
        mx.export_to_dot(text, logits, *(tap.captured.values() if tap else ()))
        return text.getvalue().count("shape=rectangle")

    for path in (case.model, case.model.monolith):
        bare = primitives(None, path)
        assert bare > 100
        assert primitives(HiddenTap(case.everything), path) == bare
        # One row of several is cut out, and copied so that the others can go.
        cut = 0 if length == 1 else 2 * len(case.everything)
        assert primitives(HiddenTap(case.everything, position=-1), path) == bare + cut
