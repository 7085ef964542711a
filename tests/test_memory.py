"""B72: memory stays flat, comes back, and holds the weights once; a forward without a tap builds no node for it."""

import io
import re
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from checkpoints import ORIGINAL, publish
from comparing import FOUR_BIT, file_of, source_of
from memory import settled
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from pairs import pair

from straightline.runtime import HiddenTap, load, specialize

pytestmark = pytest.mark.usefixtures("exact_memory")
CONFIGS = {"D6": toys.D6, "M6": toys.M6, "E6": toys.E6}
SLIDING_ONLY = toys.config(layer_types=[toys.SLIDING] * 2, num_hidden_layers=2)


def nbytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("name", ["sliding only", "E6"])
def test_two_thousand_steps(name: str) -> None:
    """Flat to the byte where every layer slides; elsewhere it grows by what the full layers' caches hold."""
    config = SLIDING_ONLY if name == "sliding only" else toys.E6
    model = pair(config, quantize=FOUR_BIT).model
    cache = model.make_cache()
    seen = []
    for number, (_, logprobs) in enumerate(
        generate_step(mx.array([1, 2, 3]), model, max_tokens=2000, prompt_cache=cache)
    ):
        if number % 200 == 199:
            mx.eval(logprobs, [one.state for one in cache])
            seen.append(settled() - sum(one.nbytes for one in cache))
    assert model.dispatch.counts["generated"] >= 2001
    assert len(seen) == 10
    assert max(seen[1:]) - min(seen[1:]) <= 4096, seen
    if name == "sliding only":
        assert all(one.nbytes == cache[0].nbytes for one in cache) and cache[0].keys.shape[2] == 8


def test_tapped_steps_keep_their_rows_only() -> None:
    """Recorded rows hold no graph: memory grows by the rows, however long the context stays open."""
    model = pair(SLIDING_ONLY, quantize=FOUR_BIT).model
    cache = model.make_cache()
    with model.tapped([0, 2]) as taps:
        list(generate_step(mx.array([1, 2, 3]), model, max_tokens=64, prompt_cache=cache))
        before, held = settled(), len(taps.steps)
        list(generate_step(mx.array([4]), model, max_tokens=256, prompt_cache=cache))
        rows = len(taps.steps) - held
        assert rows == 257
        assert settled() - before <= rows * 2 * 64 * 4 + 4096


def test_load_run_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    publish(tmp_path / "model", toys.E6, ORIGINAL)
    start = settled()
    for turn in range(4):
        model, tokenizer = load(tmp_path / "model", generate=True, strict=True)
        cache = model.make_cache()
        mx.eval(model(toys.tokens(1, 12), cache=cache), model(toys.tokens(1, 1), cache=cache))
        with model.tapped([1]):
            mx.eval(model(toys.tokens(1, 3)))
        model.layers[0].layer_scalar = mx.array([0.5])
        mx.eval(model(toys.tokens(1, 3)))
        assert settled() - start > nbytes(model) * 0.9
        del model, tokenizer, cache
        if turn == 0:
            start = max(start, settled())  # what MLX and the first load keep for good
        assert settled() <= start


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quantize", [None, FOUR_BIT], ids=["plain", "4-bit"])
def test_weights_are_held_once(name: str, quantize: Any) -> None:
    """specialize adds the folded router scales and the file's constants, and no copy of a weight; nor does a rebind."""
    file = file_of(CONFIGS[name])
    base = toys.build(CONFIGS[name], quantize=quantize)
    mx.eval([one.self_attn.rope["_freqs"] for one in base.layers if "_freqs" in one.self_attn.rope])
    specialize(base, file)  # evaluates the constants of the file
    before = settled()
    model = specialize(base, file, strict=True)
    folded = 6 * 512 if name == "M6" else 0  # 64 float32 a layer, and what MLX rounds that up to
    assert 0 <= settled() - before <= folded
    mx.eval(model(toys.tokens(1, 3)))
    model.eval()
    mx.eval(model(toys.tokens(1, 3)))
    assert 0 <= settled() - before <= folded
    del base
    assert nbytes(model) <= settled()


def test_specialized_models_share_their_arrays() -> None:
    base = toys.build(toys.D6)
    first = specialize(base, file_of(toys.D6))
    before = settled()
    others = [specialize(first, strict=True) for _ in range(5)]
    mx.eval([one(toys.tokens(1, 2)) for one in others])
    assert settled() - before < 4096


def nodes(*arrays: Any) -> int:
    """Primitives in the graph of these arrays, none of which has been evaluated."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return len(re.findall(r"\[label ?=", text.getvalue()))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [1, 12])
def test_graph_nodes(name: str, length: int) -> None:
    """As many without a tap as the same file with its taps cut out; and a tap, which keeps rows, adds none either."""
    source = source_of(CONFIGS[name])
    bare, cut = re.subn(r"tap\(-?\d+, (.*)\)$", r"\1", source, flags=re.MULTILINE)
    assert cut == 2 * 8 and "tap(" not in bare.replace("caches, tap)", "")
    module = types.ModuleType("bare")
    exec(compile(bare, "bare.py", "exec"), module.__dict__)
    base = toys.build(CONFIGS[name])
    with_taps, without = specialize(base, file_of(CONFIGS[name]), strict=True), specialize(base, module, strict=True)
    ids = toys.tokens(1, length)
    caches = [model.make_cache() for model in (with_taps, without, with_taps)]
    for model, cache in zip((with_taps, without, with_taps), caches, strict=True):
        mx.eval(model(toys.tokens(1, 3), cache=cache))
    expected = nodes(without(ids, cache=caches[1]))
    assert expected > 100
    assert nodes(with_taps(ids, cache=caches[0])) == expected
    tap = HiddenTap(range(-1, 7))
    assert nodes(with_taps(ids, cache=caches[2], tap=tap)) == expected
    assert len(tap.captured) == 8


def test_a_tap_keeps_its_rows_and_no_more() -> None:
    """The rows of two layers outlive the call; the rest of the stream does not."""
    model = pair(toys.D6).model
    ids = toys.tokens(1, 256)
    mx.eval(model(ids))
    before = settled()
    tap = HiddenTap([2, 5])
    logits = model(ids, tap=tap)
    mx.eval(logits, tap.captured)
    del logits
    assert settled() - before == 2 * 256 * 64 * 4
    del tap
    assert settled() == before
