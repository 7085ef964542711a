"""`generate_step` of runtime/decoding beside mlx-lm's: the same tokens, log-probabilities, random keys and caches."""

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import FOUR_BIT, assert_same
from mlx_lm.generate import generate_step as mlx_lm_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from pairs import TEXT_SHAPES, Pair, pair

from straightline.runtime import StraightlineError, make_cache
from straightline.runtime.decoding import generate_step
from straightline.runtime.kv.device import packing

PROMPT = [5, 17, 3, 60, 8]
SEED = 11
Pairs = list[tuple[int, mx.array]]


@cache
def models(shape: str = "e4b", window: int = 8, strict: bool = True) -> Pair:
    """Six layers of both kinds, 4-bit."""
    return pair(TEXT_SHAPES[shape] | {"sliding_window": window}, quantize=FOUR_BIT, strict=strict)


@pytest.fixture(params=["inline", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "overlapped")


def theirs(model: Any, prompt: list[int] = PROMPT, **how: Any) -> Any:
    mx.random.seed(SEED)
    return iter(mlx_lm_step(mx.array(prompt), model, **how))


def ours(model: Any, prompt: list[int] = PROMPT, **how: Any) -> Any:
    mx.random.seed(SEED)
    return generate_step(prompt, model, **how)


def key() -> mx.array:
    state: Any = mx.random.state
    return mx.array(state[0])


def first(count: int, tokens: Any) -> Pairs:
    """So many of a generation that is stopped there."""
    with closing(tokens) as running:
        return list(islice(running, count))


def calls(model: Any) -> int:
    return int(sum(model.dispatch.counts.values()))


def same_caches(found: list[Any], expected: list[Any]) -> None:
    """Their whole state: every byte that is allocated, and where the next token goes."""
    assert len(found) == len(expected)
    for index, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert type(mine).__name__ == type(other).__name__
        assert_same(mine.state, other.state, f"cache {index}")


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"sampler": make_sampler(temp=1.1)},
    "top-p": {"sampler": make_sampler(temp=0.9, top_p=0.8)},
    "min-p": {"sampler": make_sampler(temp=1.3, min_p=0.1, min_tokens_to_keep=3)},
    "top-k": {"sampler": make_sampler(temp=1.0, top_k=7)},
    "xtc": {"sampler": make_sampler(temp=1.0, xtc_probability=0.6, xtc_threshold=0.05, xtc_special_tokens=[1])},
    "all": {"sampler": make_sampler(temp=0.8, top_p=0.95, min_p=0.02, top_k=40)},
    "repetition": {"logits_processors": make_logits_processors(repetition_penalty=1.5)},
    "penalties": {
        "sampler": make_sampler(temp=1.0),
        "logits_processors": make_logits_processors({3: -2.0}, 1.3, 6, 0.4, 8, 0.2, 9),
    },
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name: str) -> None:
    both = models()
    expected = list(theirs(both.plain, max_tokens=30, **SAMPLERS[name]))
    after = key()
    assert len({token for token, _ in expected}) > (0 if name == "greedy" else 3)
    for steps in (1, 5, 8):
        found = list(ours(both.model, max_tokens=30, steps=steps, **SAMPLERS[name]))
        assert_same(found, expected, f"{steps} steps")
        assert_same(key(), after, "random key")


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 8])
def test_overlapped(name: str, steps: int) -> None:
    """A second thread only where the caller can get at nothing that it hands over."""
    both = models()
    expected = list(theirs(both.plain, max_tokens=30, **SAMPLERS[name]))
    tokens = ours(both.model, max_tokens=30, steps=steps, overlap=True, **SAMPLERS[name])
    found = list(islice(tokens, 4))
    threads = [one for one in threading.enumerate() if one.name == "straightline dispatch"]
    assert len(threads) == (name in ("greedy", "repetition"))
    assert_same([*found, *tokens], expected, "tokens")


@pytest.mark.parametrize("name", TEXT_SHAPES)
def test_shapes(name: str, overlap: bool) -> None:
    """Past the window of 8, from a prompt inside it and from one beyond it; none by mlx-lm's code."""
    both = models(name)
    for prompt in (PROMPT, list(range(20, 43))):
        expected = list(theirs(both.plain, prompt, max_tokens=24))
        assert_same(list(ours(both.model, prompt, max_tokens=24, overlap=overlap)), expected, "tokens")
    assert both.model.dispatch.counts["monolith"] == 0


def stopped(count: int, window: int, **how: Any) -> None:
    """Stopped after `count` tokens: equal tokens, log-probabilities, keys and caches of the caller's. Two turns."""
    both = models(window=window)
    caches = both.plain.make_cache(), both.model.make_cache()
    for prompt in (PROMPT, [7, 4]):
        sampler = make_sampler(temp=1.0)
        expected = first(count, theirs(both.plain, prompt, prompt_cache=caches[0], max_tokens=-1, sampler=sampler))
        after = key()
        found = first(count, ours(both.model, prompt, prompt_cache=caches[1], max_tokens=-1, sampler=sampler, **how))
        assert_same(found, expected, "tokens")
        assert_same(key(), after, "random key")
        same_caches(caches[1], caches[0])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 9, 12])
def test_stopping_at_each_place(count: int) -> None:
    """Through a window of 8, whose ring takes nothing back once it is full, so that tokens are read one by one."""
    stopped(count, 8, steps=4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 9, 12])
def test_stopping_inside_a_wide_window(count: int) -> None:
    """Rings that are not full take back what was computed too early."""
    stopped(count, 300, steps=4)


def test_several_tokens_are_computed_before_a_read() -> None:
    """Groups of 1, 2, 4, 4, and one token more, which mlx-lm has on its way too. Once a ring is full: one by one."""
    ends = {1: 1, 2: 3, 3: 3, 4: 7, 7: 7, 8: 11, 12: 15}
    for window, caches_are_ours in ((8, True), (300, True), (300, False), (8, False)):
        model = models(window=window).model
        for count, end in ends.items():
            before = calls(model)
            caches = None if caches_are_ours else model.make_cache()
            first(count, ours(model, steps=4, prompt_cache=caches))
            expected = end if caches_are_ours or window == 300 else count
            assert calls(model) - before == 1 + expected + 1, (window, caches_are_ours, count)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 17])
def test_max_tokens_is_exact(count: int, overlap: bool) -> None:
    """No token more is computed than by mlx-lm, whose loop feeds the last one too."""
    both = models()
    caches = both.plain.make_cache(), both.model.make_cache()
    expected = list(theirs(both.plain, max_tokens=count, prompt_cache=caches[0], sampler=make_sampler(temp=1.0)))
    after, before = key(), calls(both.model)
    found = list(ours(both.model, max_tokens=count, prompt_cache=caches[1], sampler=make_sampler(temp=1.0)))
    assert len(found) == count
    assert calls(both.model) - before == 1 + count + 1
    assert_same(found, expected, "tokens")
    assert_same(key(), after, "random key")
    same_caches(caches[1], caches[0])
    before = calls(both.model)
    assert len(list(ours(both.model, max_tokens=count, overlap=overlap))) == count
    assert calls(both.model) - before == 1 + count + 1


CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"kv_config": [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(3)]},
    "rollback": {"rollback": True, "depth": 4},
    "8 bits, rollback": {
        "kv_config": [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(3)],
        "rollback": True,
    },
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("window", [8, 300])
def test_caches(name: str, window: int) -> None:
    """Two turns each; the loop is compared, so mlx-lm's runs on the same model."""
    model = models(window=window, strict=False).model
    for count in (6, 13):
        expected, found = (make_cache(model, **CACHES[name]) for _ in range(2))
        for prompt in (PROMPT, [9]):
            wanted = first(count, theirs(model, prompt, prompt_cache=expected))
            assert_same(first(count, ours(model, prompt, prompt_cache=found)), wanted, "tokens")
            same_caches(found, expected)


@pytest.mark.parametrize("start", [0, 9, 1000])
def test_kv_bits(start: int) -> None:
    """Quantized on the way, at mlx-lm's token, whosever the caches are."""
    model = models(strict=False).model
    how = {"kv_bits": 8, "quantized_kv_start": start, "max_tokens": 14}
    expected, found = model.make_cache(), model.make_cache()
    wanted = list(theirs(model, prompt_cache=expected, **how))
    assert_same(list(ours(model, prompt_cache=found, **how)), wanted, "tokens")
    assert (packing(found[2])[0] == 8) == (start < 1000)
    same_caches(found, expected)
    assert_same(list(ours(model, **how)), wanted, "tokens with caches of its own")


def test_a_long_prompt_in_parts(overlap: bool) -> None:
    both = models()
    prompt = list(range(10, 51))
    seen: dict[str, list[tuple[int, int]]] = {"theirs": [], "ours": []}
    for size in (1, 7, 20, 40, 41, 100):
        how: dict[str, Any] = {"prefill_step_size": size, "max_tokens": 5}
        how["logits_processors"] = make_logits_processors(repetition_penalty=1.5, repetition_context_size=30)
        progress = {name: (lambda done, of, name=name: seen[name].append((done, of))) for name in seen}
        expected = list(theirs(both.plain, prompt, prompt_progress_callback=progress["theirs"], **how))
        found = list(ours(both.model, prompt, prompt_progress_callback=progress["ours"], overlap=overlap, **how))
        assert_same(found, expected, f"parts of {size}")
    assert seen["ours"] == seen["theirs"] and len(seen["ours"]) > 50


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_callback_that_raises(at: int) -> None:
    """Before, between and after the parts of a prompt: the caches hold what mlx-lm's hold then."""
    both = models()
    caches = both.plain.make_cache(), both.model.make_cache()
    for run, model, mine in ((theirs, both.plain, caches[0]), (ours, both.model, caches[1])):
        left = iter(range(at))

        def progress(done: int, of: int, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyError("enough")

        with pytest.raises(KeyError):
            next(run(model, prompt_cache=mine, prompt_progress_callback=progress, prefill_step_size=2))
    assert [one.offset for one in caches[1]] == [one.offset for one in caches[0]] == [(0, 2, 4, 6)[at]] * 3
    if at:
        same_caches(caches[1], caches[0])


def test_a_prompt_of_one_token_as_an_array(overlap: bool) -> None:
    both = models()
    expected = list(mlx_lm_step(mx.array([7]), both.plain, max_tokens=9))
    assert_same(list(generate_step(mx.array([7]), both.model, max_tokens=9, overlap=overlap)), expected, "tokens")


def test_functions_of_the_callers_own() -> None:
    """They may read what they are given, so no second thread evaluates meanwhile, even if asked to."""
    both = models()

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.array([int(mx.argsort(logprobs, axis=-1)[0, -2].item())], mx.uint32)

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        ids: Any = tokens.tolist()
        return logits + mx.where(mx.arange(logits.shape[-1]) == ids[-1], -3.0, 0.0)

    how: dict[str, Any] = {"sampler": sampler, "logits_processors": [processor], "max_tokens": 15}
    assert_same(list(ours(both.model, overlap=True, **how)), list(theirs(both.plain, **how)), "tokens")


class Given:
    """A model whose logits are given, whatever it is asked."""

    layers: tuple[()] = ()

    def __init__(self, logits: mx.array) -> None:
        self.logits = logits

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return mx.broadcast_to(self.logits, (1, ids.shape[1], self.logits.size))


def test_equals_after_rounding() -> None:
    """The largest logit need not have the first of the largest log-probabilities; mlx-lm takes the first."""
    logits = mx.zeros((262144,), mx.bfloat16)
    logits[7], logits[99] = 0.1, 0.11
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    assert mx.argmax(logits).item() == 99 and mx.argmax(logprobs).item() == 7
    expected = [token for token, _ in mlx_lm_step(mx.array([1]), Given(logits), max_tokens=3)]
    assert [token for token, _ in generate_step([1], Given(logits), max_tokens=3)] == expected == [7, 7, 7]


def test_a_tapped_model_records_what_mlx_lms_loop_would(overlap: bool) -> None:
    """Also where the context opens on the way."""
    both = models()
    rows = []
    for run, new in ((theirs, {}), (ours, {"overlap": overlap})):
        with both.model.tapped([0, 6]) as taps:
            first(9, run(both.model, **new))
        rows.append((len(taps.steps), taps.rows(0), taps.rows(6)))
    assert rows[0][0] == 1 + 10
    assert_same(rows[1], rows[0], "rows")
    tokens = ours(both.model, overlap=overlap)
    expected = [token for token, _ in first(20, theirs(both.plain))]
    found = [next(tokens)[0] for _ in range(5)]
    with both.model.tapped([2]) as taps:
        found += [token for token, _ in first(15, tokens)]
    assert found == expected and len(taps.steps) > 8


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "the prompt has no tokens; expected one or more"),
    "empty array": (mx.array([], mx.int32), {}, "the prompt has no tokens; expected one or more"),
    "batch": (
        [[1, 2], [3, 4]],
        {},
        "prompt has the shape (2, 2); expected the tokens of one (mlx_lm.batch_generate runs several)",
    ),
    "one of a batch": (
        mx.array([[1, 2]]),
        {},
        "prompt has the shape (1, 2); expected the tokens of one (mlx_lm.batch_generate runs several)",
    ),
    "ragged": ([[1], [2, 3]], {}, "prompt is list; expected token ids"),
    "text": ("text", {}, "prompt is str; expected token ids"),
    "nothing": (None, {}, "prompt is NoneType; expected token ids"),
    "floats": ([0.5], {}, "prompt is mlx.core.float32; expected token ids"),
    "max_tokens": ([1], {"max_tokens": -2}, "max_tokens is -2; expected a whole number, or -1 for no limit"),
    "steps": ([1], {"steps": 0}, "steps is 0; expected a whole number from 1"),
    "prefill": ([1], {"prefill_step_size": 2.5}, "prefill_step_size is 2.5; expected a whole number from 1"),
    "sampler": ([1], {"sampler": 0.7}, "sampler is 0.7; expected a function of log-probabilities"),
    "processors": (
        [1],
        {"logits_processors": [1.1]},
        "logits_processors is [1.1]; expected a list of functions of tokens and logits",
    ),
    "one processor": (
        [1],
        {"logits_processors": 3},
        "logits_processors is 3; expected a list of functions of tokens and logits",
    ),
    "tuple of caches": ([1], {"prompt_cache": ()}, "prompt_cache is a tuple; expected a list of caches, or None"),
    "callback": (
        [1],
        {"prompt_progress_callback": 3},
        "prompt_progress_callback is 3; expected a function of two numbers of tokens",
    ),
    "bits": (
        [1],
        {"kv_bits": 5},
        "kv_bits is 5 and kv_group_size 64; expected one of 2, 3, 4, 6, 8 bits in groups of 32, 64, 128",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(name: str) -> None:
    prompt, how, message = REFUSED[name]
    model = models().model
    before = calls(model)
    with pytest.raises(StraightlineError) as refused:
        generate_step(prompt, model, **how)
    assert str(refused.value) == message
    assert calls(model) == before


def test_the_window_is_what_the_tests_say() -> None:
    assert models().plain.args.sliding_window == 8
    assert [type(one).__name__ for one in models().model.make_cache()] == ["RotatingKVCache"] * 2 + ["KVCache"]
    assert toys.SLIDING in models().plain.args.layer_types
