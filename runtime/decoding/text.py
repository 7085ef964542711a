"""mlx-lm's `stream_generate` on the loop of this package: text as it comes, with mlx-lm's own response objects."""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import StraightlineError
from .loop import STEPS, generate_step, one_prompt


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str | list[int] | mx.array,
    max_tokens: int = 256,
    *,
    steps: int = STEPS,
    stop_tokens: Iterable[int] = (),
    **options: Any,
) -> Iterator[GenerationResponse]:
    """One mlx-lm GenerationResponse for each token: text, token, logprobs, finish_reason, rates.

    tokenizer: None where the prompt is token ids and no text is wanted.
    stop_tokens: ids that end the text, beside the tokenizer's own.
    steps and options: as `generate_step`'s (sampler, logits_processors, prompt_cache, kv_bits, ...).
    Raises StraightlineError if an argument cannot be used, before anything is run.
    """
    if max_tokens == 0:
        raise StraightlineError("max_tokens is 0; expected 1 or more, or -1 for no limit")
    if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise StraightlineError("prompt is text and there is no tokenizer; expected token ids")
        # As mlx-lm: a chat template has put the first special token there already.
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    ids = one_prompt(prompt)
    stops = {*stop_tokens, *(tokenizer.eos_token_ids if tokenizer is not None else ())}
    tokens = generate_step(ids, model, max_tokens=max_tokens, steps=steps, **options)
    return _responses(model, tokens, ids.size, max_tokens, stops, _Text(tokenizer))


def _responses(
    model: Any, tokens: Any, prompt_tokens: int, max_tokens: int, stops: set[int], text: "_Text"
) -> Iterator[GenerationResponse]:
    with wired_limit(model, [generation_stream]):
        before = time.perf_counter()
        prompt_tps = 0.0
        with closing(tokens):
            for count, (token, logprobs) in enumerate(tokens, 1):
                if count == 1:
                    now = time.perf_counter()
                    prompt_tps, before = prompt_tokens / (now - before), now
                reason = "stop" if token in stops else "length" if count == max_tokens else None
                if reason is not None:
                    break
                text.add(token)
                yield _response(text.segment(), token, logprobs, prompt_tokens, prompt_tps, count, before, None)
        if reason == "length":
            text.add(token)
        text.end()
        yield _response(text.segment(), token, logprobs, prompt_tokens, prompt_tps, count, before, reason)


def _response(
    text: str,
    token: int,
    logprobs: mx.array,
    prompt_tokens: int,
    prompt_tps: float,
    count: int,
    since: float,
    reason: str | None,
) -> GenerationResponse:
    return GenerationResponse(
        text=text,
        token=token,
        logprobs=logprobs,
        from_draft=False,
        prompt_tokens=prompt_tokens,
        prompt_tps=prompt_tps,
        generation_tokens=count,
        generation_tps=count / (time.perf_counter() - since),
        peak_memory=mx.get_peak_memory() / 1e9,
        finish_reason=reason,
    )


class _Text:
    """Tokens to text, in segments of whole characters; without a tokenizer, no text."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer

    def add(self, token: int) -> None:
        if self._detokenizer is not None:
            self._detokenizer.add_token(token)

    def end(self) -> None:
        """Let go of what was held back in case more came."""
        if self._detokenizer is not None:
            self._detokenizer.finalize()

    def segment(self) -> str:
        """What is new since the last one."""
        return "" if self._detokenizer is None else str(self._detokenizer.last_segment)
