"""B73: a model that is loaded in one thread and run in others, several at once, while it is changed or tapped."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import toys
from checkpoints import ORIGINAL, publish
from comparing import FOUR_BIT, assert_same, file_of
from mlx_lm.tokenizer_utils import TokenizerWrapper
from pairs import TEXT_SHAPES, Pair, pair
from test_adapters import adapt, save_adapter

from straightline.runtime import HiddenTap, load, specialize
from straightline.runtime.toy import toy_tokenizer

CONFIGS = {"D6": toys.D6, "M6": toys.M6, "E6": toys.E6}
IDS = toys.tokens(1, 9)


def in_thread(run: Callable[[], Any]) -> Any:
    """What `run` returns, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(timeout=120)


def steps(model: Any, seed: int = 0) -> list[mx.array]:
    """Logits of a prompt over the window and of three steps, evaluated."""
    cache = model.make_cache()
    logits = [model(toys.tokens(1, length, seed=seed + length), cache=cache) for length in (11, 1, 1, 1)]
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("outer", [False, True], ids=["text", "outer"])
def test_specialized_here_run_there(name: str, outer: bool) -> None:
    """The first forward of all is in another thread: nothing baked or folded is left lazy in this one."""
    models = pair(CONFIGS[name], quantize=FOUR_BIT, outer=outer)
    found = in_thread(lambda: steps(models.model))
    assert_same(found, steps(models.plain), "logits")
    assert_same(steps(models.model), found, "logits in the loading thread")


def test_loaded_there_run_here() -> None:
    model = in_thread(lambda: specialize(toys.build(toys.E6), file_of(toys.E6), strict=True))
    assert_same(steps(model), steps(toys.build(toys.E6)), "logits")


def test_several_at_once() -> None:
    """Eight threads with a cache each: every one gets its own numbers, and every call is counted."""
    models = pair(toys.E6, quantize=FOUR_BIT)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: steps(models.model, 100 * seed), range(8)))
    for seed, logits in enumerate(found):
        assert_same(logits, steps(models.plain, 100 * seed), f"thread {seed}")
    assert models.model.dispatch.counts == {"generated": 32, "monolith": 0}


def test_generate_in_a_thread() -> None:
    models = pair(TEXT_SHAPES["e4b"], quantize=FOUR_BIT)
    tokenizer = TokenizerWrapper(toy_tokenizer())
    found = in_thread(lambda: mlx_lm.generate(models.model, tokenizer, "From another thread", max_tokens=12))
    assert found == mlx_lm.generate(models.plain, tokenizer, "From another thread", max_tokens=12)


def test_loaded_with_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of an adapter are evaluated at load too."""
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    publish(tmp_path / "model", toys.E6, ORIGINAL)
    plain, _ = mlx_lm.load(str(tmp_path / "model"))
    adapt(plain, "self_attn.q_proj")
    adapter = save_adapter(tmp_path / "adapter", plain, ["self_attn.q_proj"])
    model, _ = load(tmp_path / "model", adapter_path=str(adapter), generate=True, strict=True)
    found = in_thread(lambda: steps(model))
    assert_same(found, steps(plain), "logits")


def test_changed_here_run_there() -> None:
    """The bind after a change happens in whichever thread calls next."""
    models = pair(toys.M6)
    in_thread(lambda: steps(models.model))
    for model in (models.model, models.plain):
        model.load_weights([("model.layers.0.router.scale", mx.full((64,), 0.7))], strict=False)
        mx.eval(model.parameters())
    found = in_thread(lambda: steps(models.model))
    assert_same(found, steps(models.plain), "logits")


def test_changes_during_forwards() -> None:
    """While one thread switches a layer back and forth, the others see it as it was or as it is, never neither."""
    models = pair(toys.D6)
    layers = [models.model.layers[0], models.model.layers[1]]
    expected = []
    for number in range(2):
        models.plain.layers[0] = toys.build(toys.D6).layers[number]
        expected.append(models.plain(IDS))
    mx.eval(expected)
    stop = threading.Event()
    wrong: list[str] = []
    runs = [0, 0, 0]

    def forward(number: int) -> None:
        while not stop.is_set():
            logits = models.model(IDS)
            mx.eval(logits)
            runs[number] += 1
            if not any(mx.array_equal(logits, one).item() for one in expected):
                wrong.append("neither of the two models")

    threads = [threading.Thread(target=forward, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    turns = 0
    while turns < 60 or (min(runs) < 4 and turns < 3000):  # on a busy machine one of them may come late
        models.model.layers[0] = layers[turns % 2]
        turns += 1
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong and min(runs) > 3
    assert_same(models.model(IDS), expected[(turns - 1) % 2], "logits after the last change")


def test_taps_of_their_own() -> None:
    models = pair(toys.E6)

    def tapped(seed: int) -> dict[int, mx.array]:
        tap = HiddenTap([0, 3, 6])
        mx.eval(models.model(toys.tokens(1, 7, seed=seed), tap=tap), tap.captured)
        return tap.captured

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(tapped, range(12)))
    for seed, rows in enumerate(found):
        assert_same(rows, tapped(seed), f"rows of thread {seed}")


def test_one_recorder_for_all_threads() -> None:
    """`tapped` records every forward of the model; a step holds the rows of one forward, not of two."""
    models = pair(toys.D6)
    with models.model.tapped(range(-1, 7)) as taps, ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: mx.eval(models.model(toys.tokens(1, 5, seed=seed))), range(18)))
    assert len(taps.steps) == 18
    expected = []
    for seed in range(18):
        tap = HiddenTap(range(-1, 7))
        models.model(toys.tokens(1, 5, seed=seed), tap=tap)
        expected.append(tap.captured)
    for step in taps.steps:
        match = [rows for rows in expected if mx.array_equal(rows[-1], step[-1]).item()]
        assert match
        assert_same(step, match[0], "rows of one forward")


def test_two_models_in_two_threads() -> None:
    """Binding one model while another runs: the count of changes is shared, the answers are not."""
    first, second = pair(toys.D6), pair(toys.E6)

    def run(models: Pair) -> list[Any]:
        found = []
        for number in range(6):
            models.model.layers[0].layer_scalar = mx.array([1.0 + number / 10])
            found.append(steps(models.model))
        return found

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, (first, second)))
    for models, found in zip((first, second), results, strict=True):
        for number, logits in enumerate(found):
            models.plain.layers[0].layer_scalar = mx.array([1.0 + number / 10])
            assert_same(logits, steps(models.plain), f"step {number}")
