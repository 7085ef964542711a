"""`straightline taps`: rows equal to HiddenTap's, the same bytes after a kill, constant memory, plain refusals."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import pytest
import toys
from comparing import assert_same
from safetensors import safe_open

from straightline.runtime import HiddenTap, load
from straightline.runtime.cli import main

LAYERS = [-1, 2, 6]
LENGTHS = (5, 23, 1, 12, 30, 7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taps")
    checkpoints.publish(folder, toys.E6, dtype=mx.bfloat16)
    return folder


def prompts(path: Path, lengths: tuple[int, ...] = LENGTHS) -> Path:
    lines = []
    for number, length in enumerate(lengths):
        tokens: Any = toys.tokens(1, length, seed=number).tolist()
        lines.append(json.dumps({"tokens": tokens[0]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def command(checkpoint: Path, tmp_path: Path, *more: str, out: str = "f.safetensors") -> list[str]:
    layers = ",".join(map(str, LAYERS))
    file = str(tmp_path / "p.jsonl")
    return ["taps", str(checkpoint), f"--layers={layers}", "--prompt-file", file, "--out", str(tmp_path / out), *more]


def digests(folder: Path, stem: str) -> dict[str, str]:
    return {
        path.name.removeprefix(stem): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob(f"{stem}*"))
    }


@pytest.mark.parametrize("chunk", [8, 512])
def test_rows_are_those_of_a_hidden_tap(checkpoint: Path, tmp_path: Path, chunk: int) -> None:
    prompts(tmp_path / "p.jsonl")
    assert main(command(checkpoint, tmp_path, "--chunk", str(chunk), "--shard-mb", "0.02", "--json")) == 0
    index = json.loads((tmp_path / "f.safetensors.index.json").read_text())
    assert index["complete"] and index["rows"] == sum(LENGTHS) and len(index["shards"]) > 1
    model, _ = load(checkpoint)
    seen = 0
    for entry in index["shards"]:
        arrays: dict[str, mx.array]
        arrays, metadata = mx.load(str(tmp_path / entry["file"]), return_metadata=True)  # type: ignore[misc,assignment]
        assert metadata["fingerprint"] == index["settings"]["fingerprint"] and metadata["layers"] == "[-1, 2, 6]"
        assert entry["first_prompt"] == seen
        offsets: Any = arrays["offsets"].tolist()
        for start, end in pairwise(offsets):
            tokens = arrays["tokens"][start:end]
            assert_same(tokens, toys.tokens(1, LENGTHS[seen], seed=seen)[0].astype(mx.int32), "tokens")
            caches, rows = model.make_cache(), []
            for at in range(0, end - start, chunk):
                tap = HiddenTap(LAYERS)
                model(tokens[None, at : at + chunk], cache=caches, tap=tap)
                rows.append(tap.captured)
            for layer in LAYERS:
                expected = mx.concatenate([one[layer] for one in rows], axis=1)[0]
                assert_same(arrays[f"hidden.{layer}"][start:end], expected, f"prompt {seen}, layer {layer}")
            seen += 1
    assert seen == len(LENGTHS)


def test_other_readers_take_the_files(checkpoint: Path, tmp_path: Path) -> None:
    prompts(tmp_path / "p.jsonl")
    assert main(command(checkpoint, tmp_path)) == 0
    with safe_open(str(tmp_path / "f.safetensors"), framework="numpy") as file:
        assert file.get_slice("hidden.6").get_shape() == [sum(LENGTHS), 64]
        assert file.get_slice("hidden.6").get_dtype() == "BF16"
        assert file.metadata()["prompts_digest"]


def test_batches_are_padded_where_nothing_looks_back(checkpoint: Path, tmp_path: Path) -> None:
    prompts(tmp_path / "p.jsonl")
    assert main(command(checkpoint, tmp_path, "--chunk", "8")) == 0
    assert main(command(checkpoint, tmp_path, "--chunk", "8", "--batch", "4", out="b.safetensors")) == 0
    one, four = (mx.load(str(tmp_path / name)) for name in ("f.safetensors", "b.safetensors"))
    for layer in LAYERS:
        a, b = (arrays[f"hidden.{layer}"].astype(mx.float32) for arrays in (one, four))  # type: ignore[index]
        assert mx.allclose(a, b, rtol=0.05, atol=0.05).item(), layer


def test_killed_and_started_again_the_bytes_are_the_same(checkpoint: Path, tmp_path: Path) -> None:
    prompts(tmp_path / "p.jsonl", LENGTHS * 30)
    how = ("--chunk", "8", "--shard-mb", "0.05")
    assert main(command(checkpoint, tmp_path, *how, out="whole.safetensors")) == 0
    index = tmp_path / "f.safetensors.index.json"
    kills = 0
    for wanted in (1, 3, 100):
        process = subprocess.Popen(
            [sys.executable, "-m", "straightline.runtime", *command(checkpoint, tmp_path, *how)],
            stdout=subprocess.PIPE,
        )
        while process.poll() is None:
            done = len(json.loads(index.read_text())["shards"]) if index.exists() else 0
            if done >= wanted:
                os.kill(process.pid, signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.002)
        process.communicate()
    assert kills == 2
    assert json.loads(index.read_text())["complete"]
    whole, resumed = digests(tmp_path, "whole"), digests(tmp_path, "f")
    leftovers = [name for name in resumed if name.endswith(".part")]
    assert not leftovers
    index_name = ".safetensors.index.json"
    assert len(whole) > 10 and {**whole, index_name: ""} == {**resumed, index_name: ""}
    assert (tmp_path / "whole.safetensors.index.json").read_text().replace("whole", "f") == index.read_text()


def test_complete_shards_are_kept(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts(tmp_path / "p.jsonl")
    how = command(checkpoint, tmp_path, "--shard-mb", "0.02")
    assert main(how) == 0
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("f-*")}
    removed = sorted(before)[1]
    (tmp_path / removed).unlink()
    capsys.readouterr()
    assert main(how) == 0
    assert "of them kept from before" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("f-*")}
    assert {name for name in after if after[name] != before[name]} == {removed}


def test_other_settings_are_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts(tmp_path / "p.jsonl")
    assert main(command(checkpoint, tmp_path)) == 0
    assert main(command(checkpoint, tmp_path, "--chunk", "16")) == 1
    assert capsys.readouterr().err == (
        "error: f.safetensors.index.json: was made with chunk 512, not 16; "
        "go on with the same settings, or choose another --out\n"
    )
    prompts(tmp_path / "p.jsonl", (3, 4))
    assert main(command(checkpoint, tmp_path)) == 1
    assert "was made with prompts_digest " in capsys.readouterr().err


@pytest.mark.usefixtures("exact_memory")
def test_memory_does_not_grow_with_the_prompts(checkpoint: Path, tmp_path: Path) -> None:
    peaks = []
    for number, times in enumerate((2, 40)):
        prompts(tmp_path / "p.jsonl", LENGTHS * times)
        mx.reset_peak_memory()
        assert main(command(checkpoint, tmp_path, "--chunk", "8", out=f"{number}.safetensors")) == 0
        peaks.append(mx.get_peak_memory())
    written = (tmp_path / "1.safetensors").stat().st_size
    assert written > 1_000_000
    assert peaks[1] < peaks[0] + 50_000, peaks


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "x", "p.csv: expected a .txt or .jsonl file of prompts, one a line"),
        ("p.txt", "\n\n", "p.txt: has no prompts; expected one a line"),
        ("p.jsonl", "{", "p.jsonl: line 1 is not JSON ("),
        ("p.jsonl", '{"tokens": [1]}\n\n{"words": 1}', 'p.jsonl: line 3: expected an object with "text" or "tokens"'),
        ("p.jsonl", '{"text": 1}', 'p.jsonl: line 1: expected a string as "text", or a list as "tokens"'),
        ("p.jsonl", '{"tokens": [97]}', "p.jsonl: line 1 has the token 97; expected integers from 0 to 96"),
        ("p.jsonl", '{"tokens": [true]}', "p.jsonl: line 1 has the token True; expected integers from 0 to 96"),
        ("p.jsonl", '{"text": "a\\ud800b"}', "p.jsonl: line 1: the text has half of a surrogate pair; expected whole"),
        ("p.jsonl", "[" * 100_000, "p.jsonl: line 1 is nested too deeply; expected an object"),
        ("p.jsonl", '{"tokens": []}', "p.jsonl: line 1 has no tokens; expected one or more"),
    ],
)
def test_prompts_that_cannot_be_used(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    out = str(tmp_path / "f.safetensors")
    assert main(["taps", str(checkpoint), "--layers", "1", "--prompt-file", str(tmp_path / name), "--out", out]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.glob("f*"))


def test_a_folder_in_place_of_prompts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["taps", str(checkpoint), "--layers", "1", "--prompt-file", ".", "--out", "f.safetensors"]) == 1
    assert capsys.readouterr().err.startswith("error: .: expected a .txt or .jsonl file of prompts")


def test_unknown_layers(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts(tmp_path / "p.jsonl")
    how = command(checkpoint, tmp_path)
    how[2] = "--layers=2,7"
    assert main(how) == 1
    assert capsys.readouterr().err == "error: HiddenTap: layers has 7; expected -1 to 6 (6 is after the final norm)\n"


def test_one_writer_at_a_time(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is told so before it loads anything, and the first goes on; a killed one leaves nothing locked."""
    prompts(tmp_path / "p.jsonl")
    program = (
        "import sys\nfrom pathlib import Path\nfrom straightline.runtime.commands.hold import held\n"
        "with held(Path(sys.argv[1]), 'taps'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    out = tmp_path / "rows" / "f.safetensors"
    arguments = [sys.executable, "-c", program, str(out)]
    first = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        assert main(command(checkpoint, tmp_path, out="rows/f.safetensors")) == 1
        assert capsys.readouterr().err == (
            f"error: {out}: another straightline taps is writing there; wait for it, or choose another --out\n"
        )
        assert main(command(checkpoint, tmp_path, out="rows/g.safetensors")) == 0
    finally:
        first.kill()
        first.wait()
    assert (tmp_path / "rows" / "f.safetensors.lock").exists()
    assert main(command(checkpoint, tmp_path, out="rows/f.safetensors")) == 0
    names = {path.name for path in (tmp_path / "rows").iterdir()}
    assert names == {f"{stem}.safetensors{more}" for stem in "fg" for more in ("", ".index.json")}


def test_many_at_once_never_write_together(tmp_path: Path) -> None:
    """Each that gets in is alone there, also while the lock file comes and goes."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom straightline.runtime import StraightlineError\n"
        "from straightline.runtime.commands.hold import held\n"
        "inside = Path(sys.argv[2])\nended = time.monotonic() + 2\nentered = 0\n"
        "while time.monotonic() < ended:\n"
        "    try:\n        with held(Path(sys.argv[1]), 'taps'):\n"
        "            inside.touch(exist_ok=False)\n            entered += 1\n            inside.unlink()\n"
        "    except StraightlineError:\n        pass\n"
        "print(entered)\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "f.safetensors"), str(tmp_path / "inside")]
    running = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    entered = [int(process.communicate()[0]) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum(entered) > 3


def test_a_prompt_file_is_looked_at_before_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path / "no-checkpoint", tmp_path)) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'p.jsonl'}: cannot be read (No such file or directory); expected a file of prompts\n"
    )
    (tmp_path / "p.jsonl").write_text("\n\n")
    assert main(command(tmp_path / "no-checkpoint", tmp_path)) == 1
    assert capsys.readouterr().err == "error: p.jsonl: has no prompts; expected one a line\n"
