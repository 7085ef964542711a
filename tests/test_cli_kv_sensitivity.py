"""`straightline kv-sensitivity`: the divergence against one computed apart, the knapsack, resuming, what is written."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import numpy as np
import pytest
import toys

from straightline.runtime import load, make_cache
from straightline.runtime.cli import main
from straightline.runtime.commands import divergence
from straightline.runtime.commands.knapsack import Item, choose, mean_bits
from straightline.runtime.kv.device import packing


def items(*losses: dict[int, float], numbers: tuple[int, ...] = (1, 1, 1, 1)) -> tuple[Item, ...]:
    return tuple(Item(layer, count, loss) for layer, (loss, count) in enumerate(zip(losses, numbers, strict=False)))


def test_bits_go_where_they_save_most() -> None:
    flat, steep = {2: 0.2, 4: 0.19, 8: 0.18}, {2: 5.0, 4: 1.0, 8: 0.0}
    assert choose(items(flat, steep), 5.0) == {0: 2, 1: 8}
    assert choose(items(flat, steep), 3.0) == {0: 2, 1: 4}
    assert choose(items(flat, steep), 8.0) == {0: 8, 1: 8}


def test_a_wide_layer_pays_more() -> None:
    same = {4: 1.0, 8: 0.0}
    assert choose(items(same, same, numbers=(4, 1)), 4.8) == {0: 4, 1: 8}


def test_a_loss_that_rises_is_passed_over() -> None:
    assert choose(items({2: 1.0, 3: 1.2, 4: 0.1}), 4.0) == {0: 4}
    assert choose(items({2: 1.0, 3: 1.2, 4: 0.1}), 3.5) == {0: 2}


@pytest.mark.parametrize("seed", range(20))
def test_the_target_is_kept_and_greed_comes_close(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = [dict(zip((2, 3, 4, 8), sorted(rng.exponential(1, 4))[::-1], strict=True)) for _ in range(5)]
    numbers = tuple(int(one) for one in rng.choice([256, 512], 5))
    found = items(*losses, numbers=numbers)
    target = float(rng.uniform(2.5, 7))
    chosen = choose(found, target)
    assert mean_bits(found, chosen) <= target + 1e-9
    total = sum(item.loss[chosen[item.layer]] for item in found)
    mixes = (dict(enumerate(bits)) for bits in product((2, 3, 4, 8), repeat=5))
    best = min(
        sum(item.loss[mix[item.layer]] for item in found) for mix in mixes if mean_bits(found, mix) <= target + 1e-9
    )
    assert total - best <= 0.5 * (sum(max(item.loss.values()) for item in found) - best)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sensitivity")
    checkpoints.publish(folder, toys.E6)
    return folder


@pytest.fixture
def how(checkpoint: Path, tmp_path: Path) -> list[str]:
    tokens: Any = [toys.tokens(1, 20, seed=seed).tolist()[0] for seed in range(2)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"tokens": one}) for one in tokens))
    files = ["--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "kv_config.json")]
    return ["kv-sensitivity", str(checkpoint), *files, "--target-bits", "4.5", "--chunk", "8"]


def test_the_divergence_is_that_of_the_definition(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    ids: Any = toys.tokens(1, 20).tolist()[0]
    entries = [{"layer_idx": 1, "bits": 3, "group_size": 64}]
    found = divergence.Reference(model, ids, 8).divergence(entries)
    outputs = []
    for kv_config in (None, entries):
        caches = make_cache(model, kv_config)
        chunks = [model(mx.array([ids[at : at + 8]]), cache=caches)[0] for at in range(0, 20, 8)]
        logits = np.array(mx.concatenate(chunks), np.float64)
        outputs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    p, q = outputs
    assert found == pytest.approx((np.exp(p) * (p - q)).sum(), rel=1e-3)
    assert divergence.Reference(model, ids, 8).divergence([]) == 0.0


def test_what_is_written(how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    assert main([*how, "--svg", str(tmp_path / "p.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{checkpoint.name}: KL from plain K/V in nats a token, one layer quantized at a time"
    assert lines[1].split() == [
        "layer",
        "kind",
        "2",
        "bits",
        "3",
        "bits",
        "4",
        "bits",
        "6",
        "bits",
        "8",
        "bits",
        "chosen",
        "a",
        "token",
    ]
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "sliding"], ["1", "sliding"], ["2", "full"]]
    assert lines[-1] == f"{tmp_path / 'kv_config.json'}: written"
    entries = json.loads((tmp_path / "kv_config.json").read_text())
    assert [entry["layer_idx"] for entry in entries] == [0, 1, 2]
    model, _ = load(checkpoint, kv_config=entries)
    assert [packing(cache)[0] for cache in model.make_cache()] == [entry["bits"] for entry in entries]
    assert (tmp_path / "p.svg").read_text().startswith("<svg ")


def test_more_bits_lose_less(how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*how, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean_bits"] <= 4.5 and found["tokens"] == 40
    for layer in found["layers"]:
        assert layer["kl"]["8"] < layer["kl"]["4"] < layer["kl"]["2"]


def test_it_goes_on_where_it_was(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(how) == 0
    path = tmp_path / "kv_config.json.measurements.jsonl"
    whole, kv_config = path.read_text(), (tmp_path / "kv_config.json").read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + 2 * (3 * 5 + 1)
    path.write_text("".join(lines[:9]) + lines[9][:20])  # killed within a line
    made = []
    measure = divergence.Reference.divergence
    monkeypatch.setattr(
        divergence.Reference, "divergence", lambda self, entries: made.append(entries) or measure(self, entries)
    )
    capsys.readouterr()
    assert main(how) == 0
    assert (path.read_text(), (tmp_path / "kv_config.json").read_text()) == (whole, kv_config)
    assert len(made) == 2 * (3 * 5 + 1) - 8
    assert main([*how, "--chunk", "4"]) == 1
    assert capsys.readouterr().err == (
        "error: kv_config.json.measurements.jsonl: was measured with chunk 8, not 4; "
        "go on with the same, remove the file, or choose another --out\n"
    )


def test_a_group_that_divides_no_head(how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*how, "--group-size", "128"]) == 1
    error = capsys.readouterr().err
    assert error == (
        "error: --group-size: [0].group_size is 128; expected a divisor of the 64 numbers of a head in layer 0\n"
    )
