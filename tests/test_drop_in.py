"""mlx-lm's own generators, caches, scoring and server on a specialized model: the tokens and the logits of a plain one.

Every model here is strict, so a call that left the generated path would raise. Rows of CASES: B47, B51, B52, B59.
"""

import copy
import json
import sys
import threading
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import toys
from comparing import FOUR_BIT, assert_same, assert_same_caches
from mlx_lm import server
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    KVCache,
    LRUPromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from pairs import TEXT_SHAPES, Pair, four_bit, pair

from straightline.runtime.kv.growing import KVCache as OurKVCache
from straightline.runtime.toy import VOCABULARY, toy_tokenizer

PROMPT = "What a long prompt, longer than any window here."
SHAPES = list(TEXT_SHAPES)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return TokenizerWrapper(toy_tokenizer())


@pytest.fixture(scope="module", params=SHAPES)
def models(request: pytest.FixtureRequest) -> Pair:
    return four_bit(TEXT_SHAPES[request.param])


@pytest.fixture(autouse=True)
def all_generated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs the generated file, and nothing but the generated file."""
    if "models" not in request.fixturenames:
        yield
        return
    dispatch = request.getfixturevalue("models").model.dispatch
    before = dispatch.counts["generated"]
    yield
    assert dispatch.counts["generated"] > before
    assert dispatch.counts["monolith"] == 0


def both(models: Pair, run: Any) -> tuple[Any, Any]:
    """What `run` makes of the specialized and of the plain model."""
    return run(models.model), run(models.plain)


def ids_of(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = toys.tokens(1, length, VOCABULARY, seed)[0].tolist()
    return ids


def test_generate(models: Pair, tokenizer: Any) -> None:
    found, expected = both(models, lambda model: mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=24))
    assert found == expected != ""


def test_generate_in_bfloat16(tokenizer: Any) -> None:
    models = pair(TEXT_SHAPES["e4b"], dtype=mx.bfloat16, quantize=FOUR_BIT)
    found, expected = both(models, lambda model: mlx_lm.generate(model, tokenizer, "A few words", max_tokens=12))
    assert found == expected != ""


def test_stream_generate(models: Pair, tokenizer: Any) -> None:
    def run(model: Any) -> list[Any]:
        steps = mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=20, prefill_step_size=7)
        return [(one.text, one.token, one.finish_reason, one.prompt_tokens, one.logprobs) for one in steps]

    assert_same(*both(models, run), "responses")


def test_sampling_with_processors(models: Pair, tokenizer: Any) -> None:
    def run(model: Any) -> list[Any]:
        mx.random.seed(5)
        steps = mlx_lm.stream_generate(
            model,
            tokenizer,
            PROMPT,
            max_tokens=16,
            sampler=make_sampler(temp=0.8, top_p=0.9, top_k=20),
            logits_processors=make_logits_processors(repetition_penalty=1.3),
        )
        return [(one.text, one.token, one.logprobs) for one in steps]

    assert_same(*both(models, run), "responses")


@pytest.mark.parametrize("length", [1, 2, 8, 9, 30])
def test_generate_step(models: Pair, length: int) -> None:
    """Prompts inside, at and over the window of 8; the caches end alike too."""
    prompt = mx.array(ids_of(length))

    def run(model: Any) -> Any:
        cache = make_prompt_cache(model)
        steps = list(generate_step(prompt, model, max_tokens=12, prompt_cache=cache, prefill_step_size=8))
        return steps, cache

    (found, cache), (expected, plain_cache) = both(models, run)
    assert_same(found, expected, "tokens and logprobs")
    assert len(expected) == 12
    assert_same([one.state for one in cache], [one.state for one in plain_cache], "cache")


def test_batch_generate(models: Pair, tokenizer: Any) -> None:
    prompts = [ids_of(3, 1), ids_of(21, 2), ids_of(8, 3), ids_of(9, 4)]

    def run(model: Any) -> Any:
        answer = batch_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=[9, 14, 5, 11],
            return_prompt_caches=True,
            return_token_ids=True,
            return_logprobs=True,
            prefill_step_size=6,
        )
        states = [[one.state for one in cache] for cache in answer.caches]
        return answer.texts, answer.token_ids, answer.logprobs, states

    assert_same(*both(models, run), "batch")


def test_batch_from_prompt_caches(models: Pair, tokenizer: Any) -> None:
    """B51: separately filled caches, of unequal fills before and after the wrap, are merged."""
    fills = [ids_of(fill, fill) for fill in (5, 8, 20)]

    def run(model: Any) -> Any:
        caches = []
        for ids in fills:
            caches.append(make_prompt_cache(model))
            model(mx.array([ids]), cache=caches[-1])
        answer = batch_generate(
            model,
            tokenizer,
            [ids_of(4, 7), ids_of(1, 8), ids_of(9, 9)],
            prompt_caches=caches,
            max_tokens=10,
            return_token_ids=True,
            return_logprobs=True,
        )
        return answer.token_ids, answer.logprobs

    assert_same(*both(models, run), "batch")


def test_batch_generator(models: Pair) -> None:
    """Several at once, joining and leaving: insert, segments, extract caches, remove; equal at each step."""

    def run(model: Any) -> list[Any]:
        generator = BatchGenerator(model, max_tokens=12, prefill_step_size=5, completion_batch_size=4)
        events: list[Any] = []
        uids = generator.insert([ids_of(11, 1), ids_of(2, 2)], max_tokens=[12, 10])
        for step in range(40):
            if step == 3:
                uids += generator.insert_segments([[ids_of(6, 3), ids_of(3, 4)]], max_tokens=[7])
            if step == 6:
                extracted = generator.extract_cache([uids[0]])
                events += [([one.state for one in cache], key) for cache, key in extracted.values()]
            if step == 8:
                generator.remove([uids[1]])
                uids += generator.insert([ids_of(4, 5)])
            prompts, tokens = generator.next()
            events += [(one.uid, one.progress, one.end_of_segment, one.end_of_prompt) for one in prompts]
            for one in tokens:
                state = [cache.state for cache in one.prompt_cache] if one.prompt_cache else None
                events.append((one.uid, one.token, one.finish_reason, one.logprobs, state))
            if step > 8 and not prompts and not tokens:
                break
        generator.close()
        return events

    found, expected = both(models, run)
    assert_same(found, expected, "events")
    assert {event[0] for event in expected if len(event) == 5} == {0, 1, 2, 3}
    assert sum(event[2] == "length" for event in expected if len(event) == 5) == 3


@pytest.mark.parametrize("length", [6, 20])
def test_prompt_cache_in_a_file(models: Pair, tmp_path: Path, length: int) -> None:
    """B47: save, load, go on, inside the window and after the wrap."""

    def run(model: Any) -> Any:
        cache = make_prompt_cache(model)
        model(mx.array([ids_of(length)]), cache=cache)
        path = str(tmp_path / "cache.safetensors")
        save_prompt_cache(path, cache, {"model": "toy"})
        loaded, metadata = load_prompt_cache(path, return_metadata=True)
        going_on = [list(generate_step(mx.array([5]), model, max_tokens=6, prompt_cache=c)) for c in (cache, loaded)]
        assert_same(*going_on, "loaded and kept cache")
        return going_on, metadata

    assert_same(*both(models, run), "continuation")


def test_trimmed_prompt_cache(models: Pair) -> None:
    """Inside the window mlx-lm's caches can be trimmed; after the wrap neither model's can."""

    def run(model: Any) -> Any:
        cache = make_prompt_cache(model)
        model(mx.array([ids_of(6)]), cache=cache)
        facts = [can_trim_prompt_cache(cache), trim_prompt_cache(cache, 3)]
        logits = model(mx.array([[7, 8]]), cache=cache)
        model(mx.array([ids_of(9)]), cache=cache)
        return logits, facts, can_trim_prompt_cache(cache), trim_prompt_cache(cache, 1)

    found, expected = both(models, run)
    assert_same(found, expected, "trimmed")
    assert expected[1:] == ([True, 3], False, 0)


def test_lru_prompt_cache(models: Pair) -> None:
    """An exact hit, a shorter one, and a longer one that is trimmed: each a deep copy that goes on alike."""

    def run(model: Any) -> Any:
        lru = LRUPromptCache(max_size=4)
        key, tokens = ("toy", None, None), ids_of(6)
        cache = make_prompt_cache(model)
        model(mx.array([tokens]), cache=cache)
        lru.insert_cache(key, tokens, cache)
        results = []
        for wanted in (tokens, [*tokens, 3, 4], [*tokens[:4], 9, 10]):
            copied, rest = lru.fetch_nearest_cache(key, wanted)
            results.append((rest, model(mx.array([[*rest, 11]]), cache=copied)))
        return results, lru.nbytes

    found, expected = both(models, run)
    assert_same(found, expected, "continuations")
    assert [rest for rest, _ in expected[0]] == [[], [3, 4], [9, 10]]


def test_scoring_as_perplexity(models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if "datasets" not in sys.modules:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=None))
    from mlx_lm.perplexity import eval_ppl

    data = toys.tokens(5, 24, VOCABULARY)
    found, expected = both(models, lambda model: eval_ppl(model, data, batch_size=2))
    assert found == expected


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """mlx_lm.evaluate, over stand-ins for the harness that it plugs into."""
    harness = {"lm_eval": ModuleType("lm_eval"), "lm_eval.api": ModuleType("lm_eval.api")}
    harness["lm_eval.api.model"] = model = ModuleType("lm_eval.api.model")
    harness["lm_eval.api.registry"] = registry = ModuleType("lm_eval.api.registry")
    model.LM = object  # type: ignore[attr-defined]
    registry.register_model = lambda name: lambda kind: kind  # type: ignore[attr-defined]
    for name, module in harness.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    import mlx_lm.evaluate

    return mlx_lm.evaluate


def test_scoring_as_evaluate(models: Pair, tokenizer: Any, evaluate: ModuleType) -> None:
    """Log-likelihoods of continuations (shared prefix in a cache) and of whole texts."""
    pairs = [("The sky", " is blue today"), ("The sky", " fell"), ("One", " two"), ("", "nothing before")]

    def run(model: Any) -> Any:
        scorer = evaluate.MLXLM.__new__(evaluate.MLXLM)
        scorer._model, scorer.tokenizer = model, tokenizer
        scorer._max_tokens, scorer._batch_size, scorer.use_chat_template = 64, 2, False
        inputs = [tuple(tokenizer.encode(before + after)) for before, after in pairs]
        scores = scorer._score_fn(inputs)
        likelihoods = scorer.loglikelihood([SimpleNamespace(args=one) for one in pairs[:3]])
        rolling = scorer.loglikelihood_rolling([SimpleNamespace(args=("a text that is scored whole",))])
        return scores, likelihoods, rolling

    assert_same(*both(models, run), "scores")


@pytest.mark.parametrize("name", SHAPES)
def test_speculative(name: str) -> None:
    """B59 inside the window: target and draft specialized, drafts accepted and rejected, as plain, and as greedy."""
    config = TEXT_SHAPES[name] | {"sliding_window": 64}
    target, draft = pair(config), pair(config, quantize={"group_size": 32, "bits": 6})
    prompt = mx.array(ids_of(5))
    found = list(speculative_generate_step(prompt, target.model, draft.model, num_draft_tokens=3, max_tokens=24))
    expected = list(speculative_generate_step(prompt, target.plain, draft.plain, num_draft_tokens=3, max_tokens=24))
    assert_same([one[:2] for one in found], [one[:2] for one in expected], "tokens and logprobs")
    greedy = [token for token, _ in generate_step(prompt, target.plain, max_tokens=24)]
    assert [one[0] for one in found] == greedy
    drafted = [one[2] for one in found]
    assert True in drafted and False in drafted
    for one in (target.model, draft.model):
        assert one.dispatch.counts["generated"] > 4 and one.dispatch.counts["monolith"] == 0


def test_embeddings_go_to_the_monolith() -> None:
    """generate_step with input embeddings, on a model that is not strict."""
    models = pair(TEXT_SHAPES["12b"], strict=False)
    prompt = mx.array(ids_of(10))

    def run(model: Any) -> Any:
        embeddings = model.model.embed_tokens(prompt)
        return list(generate_step(prompt, model, max_tokens=5, input_embeddings=embeddings))

    assert_same(*both(models, run), "tokens and logprobs")
    assert models.model.dispatch.counts == {"generated": 5, "monolith": 2}


def test_outer_model(tokenizer: Any) -> None:
    """The class of multimodal checkpoints, through the same entry points."""
    models = four_bit(TEXT_SHAPES["e4b"], outer=True)
    found, expected = both(models, lambda model: mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=12))
    assert found == expected
    found, expected = both(
        models,
        lambda model: batch_generate(
            model, tokenizer, [ids_of(4), ids_of(12)], max_tokens=6, return_logprobs=True, return_token_ids=True
        ),
    )
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert models.model.dispatch.counts["monolith"] == 0 < models.model.dispatch.counts["generated"]


class Served:
    """mlx_lm.server in a thread of this process, on a free port, with a given model."""

    def __init__(self, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "load", lambda *args, **kwargs: (model, tokenizer, {}))
        monkeypatch.setattr(server, "get_system_fingerprint", lambda: "test")
        arguments = Namespace(
            **dict.fromkeys(("adapter_path", "draft_model", "chat_template", "prompt_cache_bytes", "kv_bits")),
            **dict.fromkeys(("pipeline", "trust_remote_code", "use_default_chat_template"), False),
            model="toy",
            allowed_origins=["*"],
            chat_template_args={},
            num_draft_tokens=3,
            temp=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            max_tokens=32,
            decode_concurrency=4,
            prompt_concurrency=2,
            prefill_step_size=16,
            prompt_cache_size=4,
            kv_group_size=64,
            quantized_kv_start=0,
        )
        self.cache = LRUPromptCache(4)
        self.generator = server.ResponseGenerator(server.ModelProvider(arguments), self.cache)
        started: list[ThreadingHTTPServer] = []

        class Captured(ThreadingHTTPServer):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                started.append(self)
                ready.set()

        ready = threading.Event()
        self.thread = threading.Thread(
            target=server._run_http_server, args=("127.0.0.1", 0, self.generator, Captured), daemon=True
        )
        self.thread.start()
        assert ready.wait(30)
        self.httpd = started[0]

    def post(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON answer, or those of a stream."""
        url = f"http://127.0.0.1:{self.httpd.server_address[1]}{path}"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps({"model": "default_model"} | body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            raw = answer.read().decode()
        if not body.get("stream"):
            return [json.loads(raw)]
        lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def stop(self) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()
        self.generator.stop_and_join()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests from several threads at once, streamed and not, sampled with a seed (served alone) and not (batched)."""
    models = pair(TEXT_SHAPES[name])  # float32: rows of a batch then choose the tokens of a solo run
    tokenizer = TokenizerWrapper(toy_tokenizer(), eos_token_ids=[])  # each answer runs to its length
    texts = ["", "Once", PROMPT, PROMPT + " And again.", "x" * 40, "Twice"]
    requests = [
        {"prompt": text, "max_tokens": 6 + 2 * number, "stream": bool(number % 2)} for number, text in enumerate(texts)
    ]
    requests = [one for one in requests if one["prompt"]]
    served = Served(models.model, tokenizer, monkeypatch)
    try:
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda body: served.post("/v1/completions", body), requests))
        again = served.post("/v1/completions", requests[1] | {"stream": False})
        chat = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8})
        alone = served.post("/v1/completions", {"prompt": "Seeded", "max_tokens": 8, "seed": 3, "temperature": 0.7})
    finally:
        served.stop()
    for body, answer in zip(requests, answers, strict=True):
        found = "".join(one["choices"][0]["text"] for one in answer if one["choices"])
        assert found == expected_text(models.plain, tokenizer, body["prompt"], body["max_tokens"]), body
    assert again[0]["choices"][0]["text"] == "".join(one["choices"][0]["text"] for one in answers[1] if one["choices"])
    asked = server.convert_chat([{"role": "user", "content": "Hi"}])
    assert chat[0]["choices"][0]["message"]["content"] == expected_text(models.plain, tokenizer, asked, 8)
    mx.random.seed(3)
    expected = expected_text(models.plain, tokenizer, "Seeded", 8, sampler=make_sampler(temp=0.7))
    assert alone[0]["choices"][0]["text"] == expected
    assert models.model.dispatch.counts["generated"] > 20 and models.model.dispatch.counts["monolith"] == 0


def expected_text(plain: Any, tokenizer: Any, prompt: str, most: int, **how: Any) -> str:
    text: str = mlx_lm.generate(plain, tokenizer, tokenizer.encode(prompt), max_tokens=most, **how)
    return text


def test_copies_of_caches_are_apart(models: Pair) -> None:
    """mlx-lm deep-copies caches between a prompt and its continuations."""
    cache = models.model.make_cache()
    models.model(mx.array([ids_of(5)]), cache=cache)
    copied = copy.deepcopy(cache)
    first = models.model(mx.array([[3]]), cache=cache)
    second = models.model(mx.array([[3]]), cache=copied)
    assert_same(first, second, "logits")
    assert_same_caches(copied, cache)
    assert any(type(one) in (KVCache, OurKVCache) for one in cache)
