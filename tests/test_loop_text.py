"""`straightline.runtime.stream` beside `mlx_lm.stream_generate`: the same responses, but for the rates."""

from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from comparing import assert_same
from mlx_lm.generate import GenerationResponse
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from test_loop import calls, models, overlap, same_caches

from straightline.runtime import StraightlineError, stream
from straightline.runtime.toy import toy_tokenizer

__all__ = ["overlap"]  # the fixture

TEXT = "A text that is longer than the window."
SAMPLED: dict[str, Any] = {"sampler": make_sampler(temp=1.2)}


def tokenizer(*stops: int) -> Any:
    return TokenizerWrapper(toy_tokenizer(), eos_token_ids=list(stops or [1]))


def facts(response: GenerationResponse) -> list[Any]:
    """All that does not depend on the clock or on what else the process holds."""
    names = ("text", "token", "logprobs", "from_draft", "prompt_tokens", "generation_tokens", "finish_reason")
    return [getattr(response, name) for name in names]


def theirs(stops: tuple[int, ...] = (), prompt: Any = TEXT, **how: Any) -> list[list[Any]]:
    model = models().plain  # built at first use, which draws from the same random state
    mx.random.seed(2)
    return [facts(one) for one in mlx_lm.stream_generate(model, tokenizer(*stops), prompt, **how)]


def ours(stops: tuple[int, ...] = (), prompt: Any = TEXT, **how: Any) -> list[list[Any]]:
    model = models().model
    mx.random.seed(2)
    return [facts(one) for one in stream(model, tokenizer(*stops), prompt, **how)]


@cache
def tokens() -> list[int]:
    """What is sampled from `TEXT` if nothing stops it."""
    return [one[1] for one in theirs(max_tokens=60, **SAMPLED)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9, 30])
def test_up_to_a_number_of_tokens(length: int, overlap: bool) -> None:
    found = ours(max_tokens=length, overlap=overlap, **SAMPLED)
    assert_same(found, theirs(max_tokens=length, **SAMPLED), "responses")
    assert found[-1][-1] == "length" and len(found) == length


@pytest.mark.parametrize("place", range(9))
def test_up_to_a_stop_token(place: int, overlap: bool) -> None:
    """The first token, and each place of the groups that are read at once. Caches of the caller's hold it too."""
    stop = tokens()[place]
    where = tokens().index(stop)
    caches = models().plain.make_cache(), models().model.make_cache()
    found = ours((stop,), max_tokens=40, overlap=overlap, steps=4, prompt_cache=caches[1], **SAMPLED)
    assert_same(found, theirs((stop,), max_tokens=40, prompt_cache=caches[0], **SAMPLED), "responses")
    assert found[-1][-1] == "stop" and len(found) == where + 1
    same_caches(caches[1], caches[0])
    assert caches[1][0].offset == len(TEXT) + where + 1


def test_several_stop_tokens() -> None:
    """The tokenizer's, and more of the call's; whichever comes first."""
    late, early = tokens()[20], tokens()[11]
    expected = theirs((late, early), max_tokens=-1, **SAMPLED)
    assert_same(ours((late, early), max_tokens=-1, **SAMPLED), expected, "responses")
    assert_same(ours((late,), stop_tokens=[early], max_tokens=-1, **SAMPLED), expected, "responses")
    assert expected[-1][1] in (late, early)


def test_a_stop_token_as_the_last_one_allowed() -> None:
    place = next(index for index, one in enumerate(tokens()) if index > 3 and one not in tokens()[:index])
    stop = tokens()[place]
    expected = theirs((stop,), max_tokens=place + 1, **SAMPLED)
    assert_same(ours((stop,), max_tokens=place + 1, **SAMPLED), expected, "responses")
    assert expected[-1][-1] == "stop"


def test_the_same_text_as_generate() -> None:
    how = {"logits_processors": make_logits_processors(repetition_penalty=1.4), "max_tokens": 50}
    expected = mlx_lm.generate(models().plain, tokenizer(), TEXT, **how)
    assert "".join(one.text for one in stream(models().model, tokenizer(), TEXT, **how)) == expected


@pytest.mark.parametrize("prompt", [TEXT, "<bos>" + TEXT, [5, 9, 30], mx.array([5, 9, 30])], ids=str)
def test_prompts(prompt: Any) -> None:
    assert_same(ours(prompt=prompt, max_tokens=5), theirs(prompt=prompt, max_tokens=5), "responses")


def test_a_plain_tokenizer() -> None:
    expected = [one.text for one in mlx_lm.stream_generate(models().plain, toy_tokenizer(), TEXT, max_tokens=9)]
    assert [one.text for one in stream(models().model, toy_tokenizer(), TEXT, 9)] == expected


def test_without_a_tokenizer() -> None:
    ids = tokenizer().encode(TEXT)
    mx.random.seed(2)
    found = list(stream(models().model, None, ids, 60, **SAMPLED))
    assert [one.token for one in found] == tokens()
    assert {one.text for one in found} == {""} and found[-1].finish_reason == "length"
    mx.random.seed(2)
    found = list(stream(models().model, None, ids, 60, stop_tokens={tokens()[7]}, **SAMPLED))
    assert [one.token for one in found] == tokens()[: tokens().index(tokens()[7]) + 1]
    assert found[-1].finish_reason == "stop"


def test_a_reader_who_goes_away(overlap: bool) -> None:
    """Closing the text closes the tokens below it, with caches as mlx-lm leaves them."""
    caches = models().plain.make_cache(), models().model.make_cache()
    plain = mlx_lm.stream_generate(models().plain, tokenizer(), TEXT, prompt_cache=caches[0])
    expected = [facts(one) for one in islice(plain, 6)]
    responses: Any = stream(models().model, tokenizer(), TEXT, prompt_cache=caches[1], overlap=overlap)
    assert_same([facts(one) for one in islice(responses, 6)], expected, "responses")
    responses.close()
    same_caches(caches[1], caches[0])


def test_rates_and_memory_are_there() -> None:
    for one in stream(models().model, tokenizer(), TEXT, 5):
        assert one.prompt_tps > 0 and one.generation_tps > 0 and one.peak_memory > 0


def test_a_conversation() -> None:
    """Turn after turn in one prompt cache, each ended by a stop token."""
    caches = models().plain.make_cache(), models().model.make_cache()
    for turn, text in enumerate((TEXT, "Go on.", "And then?")):
        stop = (tokens()[5 + turn],)
        found = ours(stop, prompt=text, max_tokens=12, prompt_cache=caches[1], **SAMPLED)
        assert_same(found, theirs(stop, prompt=text, max_tokens=12, prompt_cache=caches[0], **SAMPLED), f"turn {turn}")
        same_caches(caches[1], caches[0])


@pytest.mark.parametrize(
    ("arguments", "how", "message"),
    [
        ((None, TEXT), {}, "prompt is text and there is no tokenizer; expected token ids"),
        ((None, [1]), {"max_tokens": 0}, "max_tokens is 0; expected 1 or more, or -1 for no limit"),
        ((None, []), {}, "the prompt has no tokens; expected one or more"),
        ((None, [1]), {"steps": "8"}, "steps is '8'; expected a whole number from 1"),
    ],
)
def test_refused_before_anything_runs(arguments: tuple[Any, Any], how: dict[str, Any], message: str) -> None:
    before = calls(models().model)
    with pytest.raises(StraightlineError) as refused:
        stream(models().model, *arguments, **how)
    assert str(refused.value) == message
    assert calls(models().model) == before
