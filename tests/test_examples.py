"""Each script under examples/, as a user runs it: on the toy model, and on a checkpoint folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import MLX, publish
from pairs import TEXT_SHAPES

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(cache: Path, name: str, *arguments: str) -> str:
    environment = os.environ | {"STRAIGHTLINE_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == [
        "drafter_features.py",
        "logit_lens.py",
        "steering.py",
    ]


def test_logit_lens(cache: Path) -> None:
    lines = run(cache, "logit_lens.py", "--prompt", "Hello").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [*map(str, range(8)), "norm"]
    assert all(re.fullmatch(r" +(\d|norm) +\d+\.\d% +'.*'", line) for line in lines[:-1])
    # The row after the norm is what the head reads: the lens and the model agree there.
    assert lines[-1] == f"The model says {lines[-2].split('%', 1)[1].strip()}."


def test_drafter_features(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "features.safetensors"
    arguments = ("--layers", "1,6,8", "--max-tokens", "5", "--out", str(out))
    said = run(cache, "drafter_features.py", *arguments)
    assert re.match(
        r"\d+ tokens, layers \[1, 6, 8\]: features \(\d+, 192\) of mlx\.core\.float32\nText: 'Once upo", said
    )
    assert "'monolith': 0}" in said
    written, metadata = mx.load(str(out), return_metadata=True)
    assert written["features"].shape == (written["tokens"].size, 192) and metadata == {"layers": "[1, 6, 8]"}
    assert written["tokens"].size > len("Once upon a time")
    assert mx.all(mx.isfinite(written["features"])).item()


def test_steering(cache: Path) -> None:
    said = run(cache, "steering.py", "--max-tokens", "12")
    found = re.fullmatch(r"Layer 2, a push of length \d+\.\d\d\.\nPlain:   (.*)\nSteered: (.*)\n", said)
    assert found is not None and found[1] != found[2]
    same = run(cache, "steering.py", "--max-tokens", "12", "--strength", "0")
    found = re.fullmatch(r"Layer 2, a push of length 0\.00\.\nPlain:   (.*)\nSteered: (.*)\n", same)
    assert found is not None and found[1] == found[2]


@pytest.mark.parametrize("name", ["logit_lens.py", "drafter_features.py", "steering.py"])
def test_on_a_checkpoint(cache: Path, tmp_path: Path, name: str) -> None:
    publish(tmp_path / "model", TEXT_SHAPES["12b"], MLX)
    assert run(cache, name, str(tmp_path / "model"), "--prompt", "Hello").count("\n") >= 3
