"""How a generation may end, and what it leaves behind: interrupts, faults, threads, memory."""

import gc
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count, islice
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import FOUR_BIT, assert_same
from memory import settled
from mlx_lm.generate import generate_step as mlx_lm_step
from mlx_lm.sample_utils import make_sampler
from pairs import pair
from test_loop import PROMPT, first, models, ours, overlap, same_caches, theirs
from test_memory import SLIDING_ONLY

from straightline.runtime.decoding import dispatchers, generate_step
from straightline.runtime.evaluation import evaluate

__all__ = ["overlap"]  # the fixture


def dispatch_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "straightline dispatch"]


def interrupt_at(call: int) -> Any:
    """A function of a layer's rows that sends Ctrl-C to this process at its n-th call, that is, inside a forward."""
    calls = count()

    def edit(index: int, rows: mx.array) -> mx.array:
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return rows

    return edit


@pytest.mark.parametrize("call", [0, 1, 2, 7, 11])
def test_an_interrupt_inside_a_forward(call: int) -> None:
    """It waits until all layers have the token: the caches are as if it had come right behind the forward."""
    both = models()
    usual = signal.getsignal(signal.SIGINT)
    caches = both.model.make_cache()
    found: list[int] = []
    with both.model.tapped([1], edit=interrupt_at(call)), pytest.raises(KeyboardInterrupt):
        for token, _ in ours(both.model, prompt_cache=caches):
            found.append(token)
    assert signal.getsignal(signal.SIGINT) is usual
    # Forward 0 is the prompt but its last token; mlx-lm hands out token n once forward n + 2 is built.
    assert len(found) == max(call - 2, 0)
    seen = (4, 5, 6)[call] if call < 3 else len(PROMPT) + len(found) + 1
    assert [one.offset for one in caches] == [seen] * 3
    if call > 2:
        expected = both.plain.make_cache()
        first(len(found) + 1, theirs(both.plain, prompt_cache=expected))
        same_caches(caches, expected)


def test_an_interrupt_of_a_handler_of_the_callers_own() -> None:
    model = models().model
    seen: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with model.tapped([1], edit=interrupt_at(4)):
            assert len(list(ours(model, max_tokens=6))) == 6
    finally:
        signal.signal(signal.SIGINT, usual)
    assert seen == [signal.SIGINT]


def test_an_interrupt_while_the_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is ahead then; the caches go back to where mlx-lm's are in that place."""
    from straightline.runtime.decoding import loop

    both = models(window=300)
    reads = iter(range(3))
    plain = loop._read

    def read(ids: mx.array) -> list[int]:
        if next(reads, None) is None:
            raise KeyboardInterrupt
        return plain(ids)

    monkeypatch.setattr(loop, "_read", read)
    caches = both.model.make_cache()
    found = []
    with pytest.raises(KeyboardInterrupt):
        for token, _ in ours(both.model, prompt_cache=caches):
            found.append(token)
    assert len(found) == 1 + 2 + 4
    expected = both.plain.make_cache()
    first(len(found) + 1, theirs(both.plain, prompt_cache=expected))
    same_caches(caches, expected)


def test_a_sampler_that_fails() -> None:
    """The caches are as mlx-lm leaves them: all layers have seen the same tokens."""
    both = models()
    caches = both.plain.make_cache(), both.model.make_cache()
    for run, model, mine in ((theirs, both.plain, caches[0]), (ours, both.model, caches[1])):
        left = iter(range(6))

        def sampler(logprobs: mx.array, left: Iterator[int] = left) -> mx.array:
            if next(left, None) is None:
                raise ArithmeticError("no more")
            return mx.argmax(logprobs, axis=-1)

        with pytest.raises(ArithmeticError):
            list(run(model, prompt_cache=mine, sampler=sampler))
    same_caches(caches[1], caches[0])


def test_a_fault_of_the_device_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models().model
    plain, left = mx.async_eval, iter(range(6))

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        @staticmethod
        def async_eval(*arrays: Any) -> None:
            if next(left, None) is None:
                raise RuntimeError("[malloc] no memory")
            plain(*arrays)

    monkeypatch.setattr(dispatchers, "mx", Failing())
    with pytest.raises(RuntimeError, match="no memory"):
        list(ours(model, overlap=True))
    assert not dispatch_threads()


def test_evaluations_of_the_model_wait_for_the_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    go = threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        @staticmethod
        def async_eval(*arrays: Any) -> None:
            go.wait(30)
            said.append("handed over")

    monkeypatch.setattr(dispatchers, "mx", Slow())
    dispatcher = dispatchers.Overlapped()
    dispatcher.submit(mx.array(1))
    threading.Timer(0.2, go.set).start()
    evaluate(mx.array(2))
    said.append("evaluated")
    dispatcher.close()
    evaluate(mx.array(3))
    assert said == ["handed over", "evaluated"]


def test_nothing_is_left_running() -> None:
    model = models().model
    for end in ("all", "closed", "dropped"):
        tokens = ours(model, max_tokens=12, overlap=True)
        if end == "all":
            list(tokens)
        else:
            list(islice(tokens, 5))
            assert len(dispatch_threads()) == 1
            if end == "closed":
                tokens.close()  # type: ignore[attr-defined]
        del tokens
        gc.collect()
        assert not dispatch_threads(), end
    before = len(dispatchers.Overlapped._idle)
    for _ in range(3):
        list(ours(model, max_tokens=3, overlap=True))
        ours(model, max_tokens=3, overlap=True)  # nobody asks it for a token
    assert len(dispatchers.Overlapped._idle) == before > 0


def test_in_threads_at_once(overlap: bool) -> None:
    """Each with its own caches, and with the random state of its thread."""
    both = models()
    how: dict[str, Any] = {"max_tokens": 20}
    if not overlap:
        how["sampler"] = make_sampler(temp=1.0)

    def run(number: int) -> list[tuple[int, mx.array]]:
        found = list(ours(both.model, [number + 3, *PROMPT], overlap=overlap, **how))
        mx.eval([one for _, one in found])
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(8)))
    for number, one in enumerate(found):
        assert_same(one, list(theirs(both.plain, [number + 3, *PROMPT], **how)), f"thread of prompt {number}")


def test_two_at_once_in_one_thread(overlap: bool) -> None:
    both = models()
    expected = [first(9, theirs(both.plain, prompt)) for prompt in (PROMPT, [4, 4])]
    with closing(ours(both.model, overlap=overlap)) as one, closing(ours(both.model, [4, 4], overlap=overlap)) as other:
        turns = list(islice(zip(one, other, strict=True), 9))
    assert_same([[turn[index] for turn in turns] for index in range(2)], expected, "tokens")


def test_weights_that_change_on_the_way() -> None:
    """Between two tokens: the model is bound anew, not while the other thread evaluates."""
    model = pair(toys.E6).model
    tokens = ours(model, steps=1, overlap=True)
    next(tokens)
    assert len(dispatch_threads()) == 1
    model.layers[0].layer_scalar = mx.array([0.5])
    found = [token for token, _ in first(8, tokens)]
    assert not dispatch_threads() and len(found) == 8


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize(("owner", "overlap"), [("loop", False), ("loop", True), ("caller", False)])
def test_two_thousand_tokens(owner: str, overlap: bool) -> None:
    """Memory is flat to a page, where every layer slides."""
    model = pair(SLIDING_ONLY, quantize=FOUR_BIT).model
    caches = model.make_cache() if owner == "caller" else None
    seen = []
    tokens = generate_step([1, 2, 3], model, max_tokens=2000, prompt_cache=caches, overlap=overlap, steps=8)
    for number, (_, logprobs) in enumerate(tokens):
        if number % 200 == 198:  # the last one before a read, at every such place alike
            mx.eval(logprobs)
            seen.append(settled())
    assert len(seen) == 10
    assert max(seen[1:]) - min(seen[1:]) <= 4 * 4096, seen


def test_the_logprobs_are_the_callers_to_keep(overlap: bool) -> None:
    """Kept to the end, they are still what mlx-lm's are: nothing is written over."""
    both = models()
    found = list(ours(both.model, max_tokens=40, overlap=overlap))
    expected = [one for _, one in mlx_lm_step(mx.array(PROMPT), both.plain, max_tokens=40)]
    assert_same([one for _, one in found], expected, "logprobs")
