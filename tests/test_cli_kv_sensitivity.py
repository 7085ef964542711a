"""`straightline kv-sensitivity`: the divergence against one computed apart, the knapsack, resuming, what is written."""

import errno
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import numpy as np
import pytest
import toys
from mlx_lm.models import cache as mlx_lm_cache

from straightline.codegen.config import read_arguments
from straightline.codegen.kv import read_kv_config
from straightline.runtime import StraightlineError, load, specialize
from straightline.runtime.cli import main
from straightline.runtime.commands import divergence
from straightline.runtime.commands.calibration import sequences
from straightline.runtime.commands.hold import held
from straightline.runtime.commands.knapsack import Item, choose, mean_bits
from straightline.runtime.commands.measurements import Measurements
from straightline.runtime.kv.device import packing
from straightline.runtime.kv.make import caches_of


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


def lossy(cache: Any, bits: int) -> Any:
    """mlx-lm's own cache of the same kind, whose rows are quantized and back again before they are stored."""
    kind: Any = type(cache)

    class Lossy(kind):
        def update_and_fetch(self, *rows: mx.array) -> Any:
            packed = (mx.quantize(one, 32, bits) for one in rows)
            return super().update_and_fetch(*(mx.dequantize(*one, 32, bits) for one in packed))

    return Lossy(cache.max_size, 0) if isinstance(cache, mlx_lm_cache.RotatingKVCache) else Lossy()


def log_probabilities(model: Any, ids: list[int], chunk: int, caches: list[Any]) -> Any:
    chunks = [model(mx.array([ids[at : at + chunk]]), cache=caches)[0] for at in range(0, len(ids), chunk)]
    logits = np.array(mx.concatenate(chunks), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("shape", ["12b", "26b", "e2b"])
def test_the_divergence_is_that_of_the_definition(shape: str) -> None:
    """Of K = V layers, experts and shared K/V, across the window: against mlx-lm's own model, caches and float64."""
    plain = toys.build(toys.SHAPES[shape])
    model = specialize(toys.build(toys.SHAPES[shape]))
    ids: Any = toys.tokens(1, 20).tolist()[0]
    reference = divergence.Reference(model, ids, 7)
    assert reference.divergence([]) == 0.0
    p = log_probabilities(plain, ids, 7, plain.make_cache())
    owners = read_arguments(plain.args).owners
    for place, bits in ((0, 3), (len(owners) - 1, 8)):
        caches = plain.make_cache()
        caches[place] = lossy(caches[place], bits)
        q = log_probabilities(plain, ids, 7, caches)
        found = reference.divergence([{"layer_idx": owners[place], "bits": bits, "group_size": 32}])
        assert found == pytest.approx((np.exp(p) * (p - q)).sum(), rel=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
def test_small_divergences_are_not_rounding(scale: float) -> None:
    rng = np.random.default_rng(0)
    plain = (rng.normal(size=(4, 20000)) * 4).astype(np.float32)
    other = plain + (rng.normal(size=plain.shape) * scale).astype(np.float32)
    p, q = (one - np.log(np.exp(one).sum(-1, keepdims=True)) for one in (plain.astype(float), other.astype(float)))
    assert divergence.divergence(mx.array(plain), mx.array(other)) == pytest.approx(
        (np.exp(p) * (p - q)).sum(), rel=1e-3
    )


def test_pieces_of_a_text_begin_as_the_tokenizer_begins_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc\n\nde\nfghij\n")

    def encode(text: str) -> list[int]:
        return [2, *map(ord, text)]

    found = sequences(path, encode, 128, 5, 8)
    assert [(one[0], "".join(map(chr, one[1:]))) for one in found] == [
        (2, "abc\n"),
        (2, "de\nf"),
        (2, "ghij"),
        (2, "\n"),
    ]
    assert sequences(path, encode, 128, 5, 2) == found[:2]
    path.write_bytes(b"abcde\n" * 9000 + b"\xff")  # what is not needed is not read
    assert len(sequences(path, encode, 128, 5, 2)) == 2


def test_measurements_of_a_hostile_file(tmp_path: Path) -> None:
    path, key = tmp_path / "m.jsonl", {"chunk": 8}
    Measurements(path, key).add([1, 2], "layer 0, 2 bits", 0.5)
    good = path.read_text()
    entry = json.loads(good.splitlines()[1])
    odd = [entry | {"kl": float("nan")}, entry | {"kl": -1.0}, entry | {"kl": "1"}, entry | {"sequence": [0]}, [1], {}]
    path.write_bytes(good.encode() + b"[" * 100000 + b"\n\xff\n" + "\n".join(map(json.dumps, odd)).encode() + b'\n{"se')
    found = Measurements(path, key)
    assert found.mean([[1, 2], [1, 2]], "layer 0, 2 bits") == 0.25 and path.read_text() == good
    assert not found.has([2, 1], "layer 0, 2 bits")
    for text in ("[1]", "3", "notes\n", '{"a": 1}\n'):
        path.write_text(text)
        with pytest.raises(StraightlineError, match=r"^m\.jsonl: does not begin as measurements do"):
            Measurements(path, key)
        assert path.read_text() == text


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


def test_what_was_measured_of_other_data_stays_apart(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer sequences, and the same lines as a text, into a file with more; each as if it were alone."""
    text = tmp_path / "a.txt"
    text.write_text("One line\nAnother line\n")
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "One line"}\n{"text": "Another line"}\n')
    few = [*how, "--candidates", "2,8"]
    runs = [[*few, "--sequences", "1"], [*few, "--data", str(text)], [*few, "--data", str(lines)]]
    assert main(few) == 0
    shared = []
    for run in runs:
        capsys.readouterr()
        assert main([*run, "--json"]) == 0
        shared.append(json.loads(capsys.readouterr().out)["layers"])
    for number, (run, layers) in enumerate(zip(runs, shared, strict=True)):
        assert main([*run, "--json", "--out", str(tmp_path / f"{number}.json")]) == 0
        assert json.loads(capsys.readouterr().out)["layers"] == layers


def test_bytes_a_token_are_those_of_real_caches(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*how, "--candidates", "3,8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    spec = read_arguments(toys.build(toys.E6 | {"sliding_window": 256}).args)
    spec = spec.with_kv(read_kv_config(json.loads((tmp_path / "kv_config.json").read_text()), spec))
    caches = caches_of(spec)
    for layer, cache in zip(spec.owners, caches, strict=True):
        rows = mx.zeros((1, spec.layers[layer].kv_heads, 256, spec.layers[layer].head_dim), mx.bfloat16)
        cache.update_and_fetch(rows, rows)
    assert sum(cache.nbytes for cache in caches) == 256 * found["bytes_a_token"]


def test_what_is_refused_before_weights_are_loaded(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    assert main([*how, "--svg", str(tmp_path / "folder")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'folder'}: is a folder; expected a file to write\n"
    before = (tmp_path / "data.jsonl").read_text()
    with pytest.raises(SystemExit) as stopped:
        main([*how, "--out", str(tmp_path / "data.jsonl")])
    assert stopped.value.code == 2 and (tmp_path / "data.jsonl").read_text() == before
    assert "--data, --out and --svg must be different files" in capsys.readouterr().err
    with held(tmp_path / "kv_config.json", "kv-sensitivity"):
        assert main(how) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'kv_config.json'}: another straightline kv-sensitivity is writing there; "
        "wait for it, or choose another --out\n"
    )


def test_a_disk_that_fills_up_is_named(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv_config.json.measurements.jsonl"

    def full(descriptor: int) -> None:
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(how) == 1
    assert capsys.readouterr().err == f"error: {path}: No space left on device\n"


def test_logits_that_are_no_numbers(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(divergence.Reference, "divergence", lambda self, entries: float("nan"))
    assert main(how) == 1
    assert capsys.readouterr().err == (
        "error: layer 0, 2 bits: the divergence is nan; expected a model whose logits are finite\n"
    )
    assert not (tmp_path / "kv_config.json").exists()


def test_a_group_that_divides_no_head(how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*how, "--group-size", "128"]) == 1
    error = capsys.readouterr().err
    assert error == (
        "error: --group-size: [0].group_size is 128; expected a divisor of the 64 numbers of a head in layer 0\n"
    )
