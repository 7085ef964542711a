"""mlx-lm's `generate_step` for one prompt, token for token, with several tokens on their way before the host reads any.

Every step does what mlx-lm's does, in its order: the same tokens, log-probabilities, random keys and, whenever the
caller gets to look, the same caches.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from ..errors import StraightlineError
from ..kv.chosen import check_kv_bits
from ..model import Specialized
from .dispatchers import Inline, Overlapped
from .interrupts import Uninterrupted
from .rewind import UNLIMITED, rewind, room

STEPS = 8
CLEAR_EVERY = 256  # tokens, as mlx-lm does: memory that MLX keeps for reuse is given back

RANDOM: Any = mx.random.state

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Progress = Callable[[int, int], Any]


def generate_step(
    prompt: mx.array | list[int],
    model: Any,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Progress | None = None,
    steps: int = STEPS,
    overlap: bool = False,
) -> Iterator[tuple[int, mx.array]]:
    """Token ids and log-probabilities [vocab], one pair a token; every argument but the last two as mlx-lm's.

    To stop at a token, close the generator: all that was computed past it is undone. `prompt_cache` is then as mlx-lm
    leaves its own, with the tokens of the prompt and all that were handed out, and so is the random state.

    steps: tokens computed before one read of the host. Counts up to it (1, 2, 4, ...), so that the first tokens come
        at once. It is 1 where what was computed too early could not be undone (a caller's caches with full rings, with
        `kv_bits`, or about to grow) and for a tapped model, whose rows are those of mlx-lm's loop.
    overlap: hand a token to the device in a second thread while the next one is built. Only where the caller can get
        at nothing that is on its way: greedy, with mlx-lm's own processors or none, caches of the loop's own, a
        specialized model that is not tapped. Elsewhere, and by default, one thread does both.
    Raises StraightlineError if an argument cannot be used, before anything is run.
    """
    tokens = one_prompt(prompt)
    if type(max_tokens) is not int or max_tokens < -1:
        raise StraightlineError(f"max_tokens is {max_tokens!r}; expected a whole number, or -1 for no limit")
    for name, value in (("steps", steps), ("prefill_step_size", prefill_step_size)):
        if type(value) is not int or value < 1:
            raise StraightlineError(f"{name} is {value!r}; expected a whole number from 1")
    if sampler is not None and not callable(sampler):
        raise StraightlineError(f"sampler is {sampler!r}; expected a function of log-probabilities")
    if not (isinstance(logits_processors or [], (list, tuple)) and all(map(callable, logits_processors or []))):
        raise StraightlineError(
            f"logits_processors is {logits_processors!r}; expected a list of functions of tokens and logits"
        )
    if prompt_cache is not None and not isinstance(prompt_cache, list):
        raise StraightlineError(f"prompt_cache is a {type(prompt_cache).__name__}; expected a list of caches, or None")
    if prompt_progress_callback is not None and not callable(prompt_progress_callback):
        raise StraightlineError(
            f"prompt_progress_callback is {prompt_progress_callback!r}; expected a function of two numbers of tokens"
        )
    if kv_bits is not None and isinstance(model, Specialized):
        # Known now, and else said when `quantized_kv_start` tokens are there.
        check_kv_bits(kv_bits, kv_group_size)
    own = prompt_cache is None
    loop = _Loop(
        model=model,
        caches=make_prompt_cache(model, max_kv_size) if prompt_cache is None else prompt_cache,
        own=own,
        sampler=sampler or greedy_sampler,
        processors=logits_processors or [],
        quantize=None if kv_bits is None else (quantized_kv_start, kv_group_size, kv_bits),
        steps=steps,
    )
    progress = prompt_progress_callback or (lambda *_: None)
    return loop.run(tokens, max_tokens, prefill_step_size, progress, overlap and loop.may_overlap())


def one_prompt(prompt: Any) -> mx.array:
    """The prompt as an array [tokens]. Raises StraightlineError if it is empty, a batch, or no token ids."""
    try:
        tokens = prompt if isinstance(prompt, mx.array) else mx.array(prompt)
    except (TypeError, ValueError):
        raise StraightlineError(f"prompt is {type(prompt).__name__}; expected token ids") from None
    if tokens.size == 0:
        raise StraightlineError("the prompt has no tokens; expected one or more")
    if tokens.ndim != 1:
        raise StraightlineError(
            f"prompt has the shape {tokens.shape}; expected the tokens of one (mlx_lm.batch_generate runs several)"
        )
    if not mx.issubdtype(tokens.dtype, mx.integer):
        raise StraightlineError(f"prompt is {tokens.dtype}; expected token ids")
    return tokens


def _read(ids: mx.array) -> list[int]:
    found: Any = ids.tolist() if ids.size > 1 else [ids.item()]
    return list(found)


def _changed(model: Specialized) -> bool:
    """Whether the next call binds the weights first."""
    return model._bound is None or model._bound.stale()


class _Token(NamedTuple):
    """On its way: its id [1], its log-probabilities [1, vocab], and the random key that was left after it."""

    id: mx.array
    logprobs: mx.array
    key: mx.array


class _Loop:
    """One generation.

    `pending` begins with the token that the caller gets next, or has just got. mlx-lm's loop has one more on its way
    whenever it hands one out, so what is behind the second pending one is ahead of mlx-lm's, and undone at the end.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        own: bool,
        sampler: Sampler,
        processors: list[LogitsProcessor],
        quantize: tuple[int, int, int] | None,
        steps: int,
    ) -> None:
        self.model, self.caches, self.own = model, caches, own
        self.sampler, self.processors, self.quantize, self.steps = sampler, processors, quantize, steps
        self.dispatcher: Inline | Overlapped = Inline()
        self.pending: deque[_Token] = deque()
        self.context: Any = None
        # An interrupt inside a forward leaves a token in some caches only, which matters if anyone uses them again.
        self.building: Any = nullcontext() if own else Uninterrupted()

    def may_overlap(self) -> bool:
        """Whether nothing but the dispatcher evaluates what is on its way.

        A caller who has the caches may read them between two tokens; one who draws random numbers, the random key of a
        sampler; functions of a caller's own, whatever they are given.
        """
        return (
            isinstance(self.model, Specialized)
            and self.own
            and self.sampler is greedy_sampler
            and self.quantize is None
            and all(getattr(one, "__module__", "") == "mlx_lm.sample_utils" for one in self.processors)
        )

    def run(
        self, prompt: mx.array, max_tokens: int, chunk: int, progress: Progress, overlap: bool
    ) -> Iterator[tuple[int, mx.array]]:
        try:
            if overlap:
                # Not before: whoever never asks for a token gives no stream back.
                self.dispatcher = Overlapped()
            last = self._prefill(prompt, chunk, progress)
            # Handed over here: what the device has to load at first, it loads in this thread.
            self._advance(last, Inline())
            yield from self._tokens(max_tokens, lambda: progress(prompt.size, prompt.size))
        finally:
            self._end()

    def _prefill(self, prompt: mx.array, chunk: int, progress: Progress) -> mx.array:
        """All of the prompt but its last token [1], which is returned."""
        progress(0, prompt.size)
        done = 0
        while (left := prompt.size - done - 1) > 0:
            with mx.stream(self.dispatcher.stream):
                tokens = prompt[done : done + min(chunk, left)]
                with self.building:
                    self.model(tokens[None], cache=self.caches)
                    self._quantize()
                mx.eval([cache.state for cache in self.caches])
                self._note(tokens)
            done += tokens.size
            progress(done, prompt.size)
            mx.clear_cache()
        with mx.stream(self.dispatcher.stream):
            return prompt[done:]

    def _tokens(self, max_tokens: int, started: Callable[[], Any]) -> Iterator[tuple[int, mx.array]]:
        size, given = 1, 0
        while True:
            count = min(size, self._reach(), UNLIMITED if max_tokens < 0 else max_tokens - given)
            ids = self._ahead(count)
            if not given:
                mx.eval(self.pending[0].id)
                started()
            if not count:
                return
            for token in _read(ids):
                # A view made here is of the caller's stream, on which it may be evaluated at any time.
                yield token, self.pending[0].logprobs.squeeze(0)
                self.pending.popleft()
                if given % CLEAR_EVERY == 0:
                    mx.clear_cache()
                given += 1
            # The first tokens are read one by one and then two by two: text appears at once, and a short answer has
            # little computed past its end.
            size = min(2 * size, self.steps)

    def _reach(self) -> int:
        """How many tokens may be computed before one is handed out."""
        tapped = isinstance(self.model, Specialized) and self.model._tap is not None
        if isinstance(self.dispatcher, Overlapped) and (tapped or _changed(self.model)):
            # A tap starts its rows, and a model that changed is bound anew: both evaluate while a step is built.
            self.dispatcher.close()
            self.dispatcher = Inline()
        if tapped:
            return 1
        if self.own:
            return UNLIMITED
        return 1 if self.quantize else max(room(self.caches), 1)

    def _ahead(self, count: int) -> mx.array:
        """Compute until one more than `count` tokens are pending; the ids of the first `count`, in one array.

        The one more keeps the device busy while the host reads the others.
        """
        ids = self.pending[0].id
        while len(self.pending) <= count:
            joins = count > 1 and len(self.pending) == count - 1
            joined = self._advance(self.pending[-1].id, self.dispatcher, count if joins else 0)
            ids = ids if joined is None else joined
        return ids

    def _advance(self, inputs: mx.array, dispatcher: Inline | Overlapped, join: int = 0) -> mx.array | None:
        """One more token, from the ids [1] before it, which need not be there yet. join: so many ids in one array."""
        joined = None
        with self.building, mx.stream(self.dispatcher.stream):
            logits = self.model(inputs[None], cache=self.caches)[:, -1, :]
            self._note(inputs)
            for processor in self.processors:
                logits = processor(self.context, logits)
            self._quantize()
            # Greedy too: rounding the difference may make equals of two logits that differ (-12.4 has coarser
            # steps in bfloat16 than 0.1 has), and of equals argmax takes the first, which need not be the larger.
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            token = _Token(self.sampler(logprobs), logprobs, RANDOM[0])
            self.pending.append(token)
            if join:
                joined = mx.concatenate([one.id for one in islice(self.pending, join)])
        dispatcher.submit(token.id, logprobs, *([] if joined is None else [joined]))
        return joined

    def _note(self, tokens: mx.array) -> None:
        """What the processors are given: the prompt and the tokens since, on the device."""
        if self.processors:
            self.context = tokens if self.context is None else mx.concatenate([self.context, tokens])

    def _quantize(self) -> None:
        if self.quantize is not None:
            maybe_quantize_kv_cache(self.caches, *self.quantize)

    def _end(self) -> None:
        try:
            self.dispatcher.close()
        finally:
            ahead = len(self.pending) - 2
            if ahead > 0:
                if RANDOM[0] is not self.pending[1].key:
                    RANDOM[0][...] = self.pending[1].key
                if not self.own:
                    rewind(self.caches, ahead)
