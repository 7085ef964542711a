"""`model.tapped`: the rows of every forward that someone else makes; editing a row on its way.

Rows are compared with hooks on a plain mlx-lm model that runs the same generation.
"""

import io
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import toys
from comparing import Hooked, assert_same
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from pairs import TEXT_SHAPES, four_bit, pair

from straightline.runtime import HiddenTap, StraightlineError
from straightline.runtime.toy import toy_tokenizer

PROMPT = "A prompt over the window"


class Recorded(Hooked):
    """A plain model under hooks that keeps the rows of every call."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.calls: list[dict[int, mx.array]] = []
        self.layers = model.layers
        self.make_cache = model.make_cache

    def __call__(self, ids: mx.array, cache: Any = None, **kwargs: Any) -> mx.array:
        logits = super().__call__(ids, cache, **kwargs)
        self.calls.append(dict(self.rows))
        return logits

    def get(self, name: str, default: Any = None) -> Any:
        return default


@pytest.mark.parametrize("name", TEXT_SHAPES)
@pytest.mark.parametrize("outer", [False, True], ids=["text", "outer"])
def test_around_stream_generate(name: str, outer: bool) -> None:
    """Each forward's rows: two chunks of the prompt, its last token, then one a token."""
    models = four_bit(TEXT_SHAPES[name], outer=outer)
    tokenizer = TokenizerWrapper(toy_tokenizer(), eos_token_ids=[])
    layers = [5, -1, 2, 6]
    with models.model.tapped(layers) as taps:
        found = [
            (one.token, one.logprobs)
            for one in mlx_lm.stream_generate(models.model, tokenizer, PROMPT, max_tokens=6, prefill_step_size=16)
        ]
    recorded = Recorded(models.plain)
    expected = list(generate_step(mx.array(tokenizer.encode(PROMPT)), recorded, max_tokens=6, prefill_step_size=16))
    assert_same(found, expected[: len(found)], "tokens and logprobs")
    lengths = [step[2].shape[1] for step in taps.steps]
    assert lengths[:4] == [16, 7, 1, 1] and len(lengths) in (8, 9)
    for number, step in enumerate(taps.steps):
        assert set(step) == set(layers)
        for index in layers:
            assert_same(step[index], recorded.calls[number][index], f"tap {index} of call {number}")
    for index in layers:
        joined = mx.concatenate([call[index] for call in recorded.calls[: len(lengths)]], axis=1)
        assert_same(taps.rows(index), joined, f"rows of {index}")
    assert_same(taps.captured, taps.steps[-1], "captured")
    assert models.model.dispatch.counts["monolith"] == 0


def test_one_position() -> None:
    model = pair(toys.E6).model
    with model.tapped([0, 3], position=-1) as taps:
        cache = model.make_cache()
        for length in (9, 1, 4):
            model(toys.tokens(2, length), cache=cache)
    assert [step[0].shape for step in taps.steps] == [(2, 1, 64)] * 3
    assert taps.rows(3).shape == (2, 3, 64)


def test_around_batch_generate() -> None:
    models = four_bit(TEXT_SHAPES["12b"])
    tokenizer = TokenizerWrapper(toy_tokenizer())
    prompts = [list(range(5, 9)), list(range(5, 25))]
    with models.model.tapped([6]) as taps:
        found = batch_generate(models.model, tokenizer, prompts, max_tokens=4, return_token_ids=True)
    expected = batch_generate(models.plain, tokenizer, prompts, max_tokens=4, return_token_ids=True)
    assert found.token_ids == expected.token_ids
    assert taps.steps[-1][6].shape[1:] == (1, 64) and {step[6].shape[0] for step in taps.steps} <= {1, 2}


def test_only_inside() -> None:
    model = pair(toys.D6).model
    ids = toys.tokens(1, 4)
    model(ids)
    with model.tapped([1]) as taps:
        assert taps.steps == []
        model(ids)
    model(ids)
    assert len(taps.steps) == 1
    with model.tapped([2]) as later:
        model(ids)
    assert len(taps.steps) == len(later.steps) == 1 and list(later.steps[0]) == [2]


def test_a_tap_of_the_call_goes_first() -> None:
    model = pair(toys.D6).model
    tap = HiddenTap([3])
    with model.tapped([1]) as taps:
        model(toys.tokens(1, 4), tap=tap)
    assert list(tap.captured) == [3] and taps.steps == []


def test_on_the_monolith_too() -> None:
    """Calls that the file does not serve are tapped the same way."""
    models = pair(toys.E6, strict=False)
    ids = toys.tokens(1, 5)
    embeddings = models.plain.model.embed_tokens(ids)
    with models.model.tapped(range(-1, 7)) as taps:
        models.model(ids)
        models.model(ids, input_embeddings=embeddings)
    assert models.model.dispatch.counts == {"generated": 1, "monolith": 1}
    assert_same(taps.steps[1], taps.steps[0], "rows")


def test_not_twice_at_once() -> None:
    model = pair(toys.D6).model
    with model.tapped([1]) as taps:
        with (
            pytest.raises(StraightlineError, match=r"^tapped: the model is tapped already; expected one context"),
            model.tapped([2]),
        ):
            raise AssertionError("entered")
        model(toys.tokens(1, 3))
    assert len(taps.steps) == 1


def test_left_by_an_exception() -> None:
    model = pair(toys.D6).model
    with pytest.raises(KeyError), model.tapped([1]):
        raise KeyError
    with model.tapped([1]) as taps:
        model(toys.tokens(1, 3))
    assert len(taps.steps) == 1


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([7], r"^HiddenTap: layers has 7; expected -1 to 6 \(6 is after the final norm\)$"),
        ([-2], r"^HiddenTap: layers has -2; expected integers from -1$"),
        ([1, 1], r"^HiddenTap: layers has 1 more than once; expected each index once$"),
    ],
)
def test_bad_layers(layers: list[int], message: str) -> None:
    model = pair(toys.D6).model
    with pytest.raises(StraightlineError, match=message), model.tapped(layers) as taps:
        model(toys.tokens(1, 3))
    assert model._tap is None
    if layers == [7]:
        assert taps.steps == []


def test_rows_that_are_not_there() -> None:
    model = pair(toys.D6).model
    with model.tapped([1, 4]) as taps:
        with pytest.raises(StraightlineError, match=r"^tapped: nothing has been run yet; expected a forward inside"):
            taps.rows(1)
        model(toys.tokens(1, 3))
    with pytest.raises(StraightlineError, match=r"^tapped: 2 was not asked for; expected one of \[1, 4\]$"):
        taps.rows(2)


def test_rows_of_batches_that_change() -> None:
    """As in batch_generate: two prompts of other lengths, then one of them alone."""
    model = pair(toys.D6).model
    with model.tapped([1]) as taps:
        model(toys.tokens(2, 3))
        model(toys.tokens(1, 1))
    with pytest.raises(StraightlineError) as refused:
        taps.rows(1)
    assert str(refused.value) == (
        "tapped: the forwards had batches of 1, 2, so no rows of theirs are one text; read `steps`"
    )
    assert [step[1].shape for step in taps.steps] == [(2, 3, 64), (1, 1, 64)]


@pytest.mark.parametrize("name", ["D6", "M6", "E6"])
def test_steering(name: str) -> None:
    """An edit goes on to the later layers and the logits, and is captured; both paths agree on it bit for bit."""
    models = pair({"D6": toys.D6, "M6": toys.M6, "E6": toys.E6}[name])
    ids = toys.tokens(1, 10)
    direction = mx.random.normal((64,), key=mx.random.key(4))

    def push(index: int, rows: mx.array) -> mx.array:
        return rows + direction if index == 2 else rows

    plain = models.model(ids)
    with models.model.tapped([1, 2, 3], edit=push) as taps:
        steered = models.model(ids)
        monolith = models.model.monolith(ids, tap=HiddenTap([1, 2, 3], edit=push))
    assert_same(steered, monolith, "steered logits")
    assert not mx.array_equal(steered, plain)
    bare = HiddenTap([1, 2, 3])
    models.model(ids, tap=bare)
    assert_same(taps.steps[0][1], bare.captured[1], "a layer before")
    assert_same(taps.steps[0][2], bare.captured[2] + direction, "the edited layer")
    assert not mx.array_equal(taps.steps[0][3], bare.captured[3])
    assert_same(models.model(ids), plain, "logits after the context")


def test_steering_every_tap_once() -> None:
    """Each index is edited where it lies: replacing the stream by a constant hides what came before, nothing else."""
    models = pair(toys.E6)
    first, second = toys.tokens(1, 6, seed=1), toys.tokens(1, 6, seed=2)
    for index in range(-1, 7):
        tap = HiddenTap([index], edit=lambda _, rows: mx.ones_like(rows))
        logits = [models.model(ids, tap=tap) for ids in (first, second)]
        hidden = index in (5, 6)  # after others, layers still read per-layer inputs, and shared K/V, of the ids
        assert mx.array_equal(*logits).item() == hidden, index
        assert_same(logits[0], models.model.monolith(first, tap=tap), f"tap {index}")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index, rows: None, "edit returned NoneType; expected mlx.core.float32 "),
        (lambda index, rows: rows[:, :1], r"edit returned mlx.core.float32 \(1, 1, 64\); expected"),
        (lambda index, rows: rows.astype(mx.float16), r"edit returned mlx.core.float16 \(1, 5, 64\); expected"),
    ],
)
def test_edits_that_do_not_fit(edit: Any, message: str) -> None:
    """Refused, and the forward that failed leaves no half a step."""
    model = pair(toys.D6).model
    with model.tapped([2], edit=edit) as taps:
        with pytest.raises(StraightlineError, match=message):
            model(toys.tokens(1, 5))
        assert taps.steps == []
    assert model.dispatch.counts == {"generated": 0, "monolith": 0}


def test_steered_generation() -> None:
    """Around mlx-lm's generator the edit acts on every token."""
    models = pair(TEXT_SHAPES["e4b"])
    tokenizer = TokenizerWrapper(toy_tokenizer(), eos_token_ids=[])
    calls = []

    def edit(index: int, rows: mx.array) -> mx.array:
        calls.append(rows.shape[1])
        return rows * 0.5

    plain = mlx_lm.generate(models.model, tokenizer, PROMPT, max_tokens=8)
    with models.model.tapped([1], edit=edit):
        steered = mlx_lm.generate(models.model, tokenizer, PROMPT, max_tokens=8)
    assert steered != plain == mlx_lm.generate(models.model, tokenizer, PROMPT, max_tokens=8)
    assert calls[0] == len(PROMPT) - 1 and set(calls[1:]) == {1}


def test_rows_of_one_token_are_left_to_its_logits() -> None:
    """They are not started by themselves, and the thread's next forward leaves none behind that nobody asked for."""
    model = pair(toys.E6).model
    caches = model.make_cache()
    with model.tapped([0, 6]) as taps:
        for length in (4, 1, 1, 1):
            logits = model(toys.tokens(1, length), cache=caches)
        graph = io.StringIO()
        mx.export_to_dot(graph, taps.steps[-2][6])
        assert "rectangle" not in graph.getvalue()
        mx.export_to_dot(graph, taps.steps[-1][6])
        assert "rectangle" in graph.getvalue()
        mx.eval(logits)
        graph = io.StringIO()
        mx.export_to_dot(graph, taps.steps[-1][6])
        assert "rectangle" not in graph.getvalue()
