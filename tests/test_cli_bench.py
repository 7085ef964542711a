"""`straightline bench`: cells on one model, a table or JSON, a chart, exit codes. Its numbers: test_benchmark.py."""

import json
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import toys

from straightline.runtime.benchmark import measures, models, race
from straightline.runtime.cli import main
from straightline.runtime.verification.control import spoil

COUNTED = ["--steps", "2", "--tokens", "1", "--rounds", "3"]
FEW = ["--steps", "2", "--seconds", "0.01"]
bandwidth = cache(measures.bandwidth)


@pytest.fixture(autouse=True)
def numbers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth is measured once for all tests, and a peak once: these numbers are test_benchmark.py's."""
    monkeypatch.setattr(measures, "bandwidth", bandwidth)
    monkeypatch.setattr(race, "PEAKS", 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder whose file lies in the user's cache, as after load(folder, generate=True)."""
    folder = tmp_path_factory.mktemp("bench")
    with checkpoints.with_files(folder, checkpoint=toys.E6):
        yield str(folder / "checkpoint")


def test_a_published_architecture_reduced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a user without a GPU runs: several cells on one model, quantized K/V in the mix of the published file."""
    chart = tmp_path / "chart.svg"
    command = [
        "bench",
        "--random",
        "gemma4-e4b",
        "--context",
        "9",
        "--width",
        "1,2",
        "--taps",
        "5,42",
        "--prefill",
        "5",
    ]
    assert main([*command, "--kv-config", "auto", "--bits", "mixed", "--svg", str(chart), "--json", *FEW]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["side"]) for row in found["rows"]] == [
        (name, side)
        for name in ("context 9, tapped", "context 9, width 2, tapped", "prefill 5, tapped")
        for side in ("mlx-lm", "straightline")
    ]
    assert {row["departs"] for row in found["rows"]} == {""} and {row["rounds"] for row in found["rows"]} == {3}
    assert all(row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"] for row in found["rows"])
    assert found["rows"][1]["primitives"] < found["rows"][0]["primitives"]
    assert found["rows"][1]["launching"] < found["rows"][0]["launching"] < found["rows"][0]["primitives"]
    machine = found["machine"]
    assert machine["model"] == "gemma4-e4b, reduced to toy widths, random weights of mixed bits"
    assert machine["K/V"] == "18 of 4 bits, 6 of 8 bits, the other layers plain"
    assert (machine["tier"], machine["taps"], machine["one token"]) == ("exact", "5, 42", "by decode")
    assert machine["in place"]
    assert {"command", "commit", "device", "packages", "specialize", "bandwidth"} <= set(machine)
    assert {site["state"] for site in found["fused_sites"]} == {"plain"}
    assert ET.parse(chart).getroot().tag.endswith("svg")


def test_a_checkpoint_in_a_table(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", checkpoint, "--context", "12", "--batch", "1,2", "--forward", *COUNTED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(" sites, all plain (the default device is the CPU): " in line for line in lines)
    assert lines[0].startswith("command ") and "model        the checkpoint checkpoint" in lines
    table = lines[lines.index("") + 3 :]
    assert [line[:44].split() for line in table] == [
        ["context", "12", "mlx-lm"],
        ["forward"],
        ["straightline"],
        ["context", "12,", "batch", "2", "mlx-lm"],
        ["forward"],
        ["straightline"],
    ]
    assert all(line[44:].split()[0].startswith("x") and line.endswith("  2") for line in table)


def test_one_changed_bit_gets_no_ratio(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair_of = models.pair_of

    def spoiled(*arguments: Any) -> models.Pair:
        pair = pair_of(*arguments)
        spoil(pair.model)
        return pair

    monkeypatch.setattr(models, "pair_of", spoiled)
    assert main(["bench", checkpoint, "--context", "12", *FEW]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split("  ")[-1] == "departs from mlx-lm at step 0: logits" and " x" not in last


def test_the_fast_tier_says_where_it_runs(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nowhere on a CPU, so the bits are mlx-lm's, and the table does not say otherwise."""
    assert main(["bench", checkpoint, "--context", "12", "--tier", "fast", "--json", *FEW]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["tier"].startswith("fast; ") and " exact: " in found["machine"]["tier"]
    assert [(row["departs"], row["by_choice"]) for row in found["rows"]] == [("", False)] * 2


def test_cells_that_fail_say_why_and_the_others_run(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No file bakes these caches, and a ratio of mlx-lm's code with itself is not shown."""
    assert main(["bench", checkpoint, "--context", "12", "--prefill", "9", "--kv-bits", "8", *FEW]) == 1
    lines = capsys.readouterr().out.splitlines()[-2:]
    reason = "cache 0 is QuantizedRingCache, file expects RotatingKVCache"
    assert lines == [
        f"{name:<30}  straightline: cannot be run: strict: the generated file cannot serve this call: {reason}"
        for name in ("context 12", "prefill 9")
    ]


def test_the_suite_runs_within_its_budget(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its cells, with the long ones cut: a toy on a CPU has no use for 32k tokens."""
    from straightline.runtime.benchmark import cells

    whole = cells.suite

    def cut(taps: tuple[int, ...]) -> list[cells.Cell]:
        return [
            cells.Cell(min(one.context, 16), min(one.batch, 2), one.width, min(one.prefill, 16), one.taps, one.loop)
            for one in whole(taps)
        ]

    monkeypatch.setattr(cells, "suite", cut)
    assert main(["bench", checkpoint, "--suite", "--seconds", "0.05", "--steps", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * 16 and {row["departs"] + row["problem"] for row in rows} == {""}
    assert sum(bool(row["cell"]["taps"]) for row in rows) == 2 * 4


def test_auto_needs_a_kv_config(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", checkpoint, "--kv-config", "auto"]) == 1
    assert capsys.readouterr().err == (
        "error: checkpoint: has no kv_config.json of its own; name a file in place of auto\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one CHECKPOINT, or --random NAME"),
        (["x", "--random", "gemma4-e4b"], "name one CHECKPOINT, or --random NAME"),
        (["x", "--reduced"], "--reduced and --bits go with --random; a checkpoint is timed as it is"),
        (["x", "--bits", "8"], "--reduced and --bits go with --random; a checkpoint is timed as it is"),
        (
            ["x", "--width", "1,0"],
            "--context, --batch, --width, --prefill, --tokens, --rounds and --steps must be 1 or more",
        ),
        (
            ["x", "--steps", "0"],
            "--context, --batch, --width, --prefill, --tokens, --rounds and --steps must be 1 or more",
        ),
        (["x", "--seconds", "nan"], "--seconds must be above 0 and below 1000000"),
        (
            ["x", "--loop", "--kv-bits", "8"],
            "--loop goes with plain K/V; mlx-lm's loop has no others for sliding layers",
        ),
        (["x", "--context", "a"], "argument --context: 'a'; expected whole numbers, each once, such as 5,17,48"),
        (["x", "--kv-bits", "8", "--kv-config", "f"], "argument --kv-config: not allowed with argument --kv-bits"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {message} (see straightline bench --help)\n"


def test_a_kv_config_that_does_not_fit_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.json"
    path.write_text(json.dumps([{"layer_idx": 99, "bits": 8, "group_size": 64}]))
    assert main(["bench", "--random", "gemma4-e4b", "--kv-config", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "layer_idx is 99" in error
