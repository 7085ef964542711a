"""`straightline verify`: every cell equal where it is, and the first difference named where it is not."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import toys
from test_in_place import leasing

from straightline.runtime import StraightlineError
from straightline.runtime.cli import main
from straightline.runtime.in_place import Lease
from straightline.runtime.verification import proof, walks
from straightline.runtime.verification.smaller import reduced

EIGHT = [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder whose file lies in the user's cache, as after load(folder, generate=True)."""
    folder = tmp_path_factory.mktemp("verify")
    with checkpoints.with_files(folder, checkpoint=toys.E6):
        yield str(folder / "checkpoint")


def test_a_published_architecture_reduced(capsys: pytest.CaptureFixture[str]) -> None:
    """What a user without a GPU runs: all 42 layers, quantized K/V and rollback included."""
    assert main(["verify", "--random", "gemma4-e4b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    results = {cell["cell"]: cell["result"] for cell in found["cells"]}
    assert found["equal"] and len(results) == 36
    assert results.pop("control: one bit of one weight") == "seen"
    assert set(results.values()) == {"equal"}
    assert sum(cell.startswith("quantized K/V") for cell in results) == 7
    machine = found["machine"]
    assert machine["sizes"].startswith("42 layers, window 8, float32, ")
    assert machine["model"] == "gemma4-e4b, reduced to toy widths, layers as published, random weights"
    assert {(one["state"], one["reason"]) for one in found["fused_sites"]} == {
        ("plain", "the default device is the CPU")
    }
    assert {"command", "commit", "machine", "device", "python", "packages", "fingerprint", "seed"} <= set(machine)


def test_a_checkpoint(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(checkpoint, "kv_config.json").write_text(json.dumps(EIGHT))
    assert main(["verify", checkpoint, "--steps", "1"]) == 0
    Path(checkpoint, "kv_config.json").unlink()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("command ")
    assert any(line.startswith("  prefill inside the window              equal ") for line in lines)
    # No file bakes these caches, and comparing mlx-lm's code with itself is not called a proof.
    assert sum("monolith: cache 0 is Quantized" in line for line in lines) == 7
    assert lines[-1].startswith("equal: 29 of 36 cells, every byte of logits, caches and taps; 7 went to mlx-lm's own")


def test_one_changed_bit_is_found(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", checkpoint, "--steps", "1", "--spoil"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("DEPARTS in "), last
    assert ", first in prefill inside the window: call 0 (5 wide): tap 5 at flat index " in last


def test_a_checkpoint_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.publish(tmp_path, toys.D6)
    assert main(["verify", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {tmp_path.name}: there is nothing to verify: no generated file has the fingerprint "
    )


def test_weights_are_held_once(checkpoint: str) -> None:
    found = proof.from_checkpoint(checkpoint)
    assert found.oracle.language_model.model.norm.weight is found.model.language_model.model.norm.weight
    assert type(found.oracle).__module__ == "mlx_lm.models.gemma4"


def test_without_the_tools_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name: None)
    assert main(["verify", "--random", "gemma4-e4b"]) == 1
    assert capsys.readouterr().err == (
        "error: a smaller model needs a file of its own, and rendering one needs jinja2; install it with "
        "pip install 'straightline[codegen]', or verify at full size with --no-reduced\n"
    )


def test_what_mlx_cannot_run_is_neither_equal_nor_a_departure(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CUDA, MLX has no kernel for some quantized attention; and a forward that fails alone does depart."""
    evaluated, fails = walks.evaluated, [lambda call: call == 0]
    calls = [0]

    def failing(logits: Any, caches: Any) -> Any:
        calls[0] += 1
        if fails[0](calls[0] - 1):
            raise RuntimeError("[quantized_matmul] No implementation for problem shape: 9x9x9x9.\nmore")
        return evaluated(logits, caches)

    monkeypatch.setattr(walks, "evaluated", failing)
    assert main(["verify", checkpoint, "--steps", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["cells"][0]
    assert (first["result"], first["where"]) == (
        "cannot",
        "mlx-lm itself, in call 0 (5 wide): [quantized_matmul] No implementation for problem shape: 9x9x9x9",
    )
    calls[0], fails[0] = 0, lambda call: call == 1
    assert main(["verify", checkpoint, "--steps", "1", "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["cells"][0]
    assert first["result"] == "departs" and "fails where mlx-lm's does not" in first["where"]


@pytest.mark.usefixtures("keys_as_values")
def test_single_tokens_are_compared_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ends once its caches are looked at, so that nobody looks in the middle of a cell."""
    models, tokens, begin = leasing("e4b", 16), [0], Lease.begin

    def counted(lease: Lease, *arguments: Any) -> Any:
        tokens[0] += 1
        return begin(lease, *arguments)

    monkeypatch.setattr(Lease, "begin", counted)
    found = {}
    for walk in walks.walks(16, 6):
        if walk.cells[-1][1][-1] == walk.batch == 1:
            for row in walks.run_walk(walk, models.plain, models.model, 97, 0):
                found[row.cell], tokens[0] = (row.departs, tokens[0]), 0
    assert {cell: seen for cell, seen in found.items() if seen[1]} == {
        "decode inside": ("", 4),
        "decode across the wrap": ("", 4),
        "decode after a prompt of the window": ("", 4),
        "batch of 1: decode across the wrap": ("", 2),
        "batch of 1: decode past the window": ("", 6),
    }


@pytest.mark.parametrize("name", ["gemma4-12b", "gemma4-26b", "gemma4-31b", "gemma4-e2b", "gemma4-e4b"])
def test_reduced_keeps_the_layers(name: str) -> None:
    from straightline.codegen.config import read_config
    from straightline.runtime.commands.subject import published

    subject = published(name)
    small = read_config(reduced(subject.config))
    for mine, theirs in zip(small.layers, subject.spec.layers, strict=True):
        assert (mine.attention, mine.kv_source, mine.k_eq_v) == (theirs.attention, theirs.kv_source, theirs.k_eq_v)
        assert mine.head_dim % 64 == 0
    assert small.sliding_window == 8 and (small.experts is None) == (subject.spec.experts is None)


def test_too_few_layers() -> None:
    with pytest.raises(StraightlineError, match=r"2 layers are too few: .*; expected 3 or more"):
        proof.from_random("gemma4-e2b", True, 2, None, 0)
