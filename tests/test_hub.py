"""Hub ids without a network: found in huggingface_hub's cache, or one sentence that says it is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
import toys

from straightline.runtime import load
from straightline.runtime.toy import VOCABULARY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHAPE = toys.E6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose hub cache holds org/toy in its latest revision, and no way out."""
    root = tmp_path_factory.mktemp("hub")
    held = root / "home" / "hub" / "models--org--toy"
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text(COMMIT)
    checkpoints.publish(held / "snapshots" / COMMIT, SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRAIGHTLINE_CACHE", str(root / "cache"))
        load(held / "snapshots" / COMMIT, generate=True)
    ours = {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1", "STRAIGHTLINE_CACHE": str(root / "cache")}
    others = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    return others | ours


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)


def test_load(offline: dict[str, str]) -> None:
    program = (
        "import mlx_lm\nfrom straightline.runtime import load\n"
        "model, tokenizer = load('org/toy', strict=True)\n"
        "mlx_lm.generate(model, tokenizer, 'Hello', max_tokens=4)\nprint(model.dispatch.counts['monolith'])\n"
        f"load('org/toy', revision='{COMMIT}')\n"
    )
    ran = run(offline, "-c", program)
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr


def test_load_of_what_is_not_there(offline: dict[str, str]) -> None:
    program = (
        "from straightline.runtime import StraightlineError, load\n"
        "for name, revision in (('org/absent', None), ('org/toy', 'v2'), ('no/such/place', None)):\n"
        "    try:\n        load(name, revision=revision)\n"
        "    except StraightlineError as error:\n        print(error)\n"
    )
    ran = run(offline, "-c", program)
    lines = ran.stdout.splitlines()
    assert len(lines) == 3, ran.stdout + ran.stderr
    for line, name in zip(lines, ("org/absent", "org/toy", "no/such/place"), strict=True):
        assert line.startswith(f"{name}: is no folder here and cannot be had from the hub: "), line


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "org/toy"],
        ["explain", "org/toy", "--json"],
        ["generate", "--model", "org/toy", "--prompt", "Hello", "--max-tokens", "4"],
        ["verify", "org/toy", "--steps", "1", "--json"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_the_command_line(command: list[str], offline: dict[str, str]) -> None:
    ran = run(offline, "-m", "straightline.runtime", *command)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    if "--json" in command:
        found = json.loads(ran.stdout)
        assert found.get("name", "org/toy") == "org/toy" and found.get("equal", True) and found.get("served", True)


def test_taps_on_the_command_line(offline: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello\n")
    arguments = ["taps", "org/toy", "--layers", "1,6", "--prompt-file", str(tmp_path / "prompts.txt")]
    ran = run(offline, "-m", "straightline.runtime", *arguments, "--out", str(tmp_path / "rows.safetensors"))
    assert ran.returncode == 0, ran.stderr
    index = json.loads((tmp_path / "rows.safetensors.index.json").read_text())
    assert index["complete"] and index["settings"]["model"] == "org/toy"


ABSENT = [
    ["explain", "org/absent"],
    ["show", "org/absent"],
    ["verify", "org/absent"],
    ["bench", "org/absent"],
    ["generate", "--model", "org/absent"],
    ["serve", "--model", "org/absent"],
    ["taps", "org/absent", "--layers", "1", "--prompt-file", "f.txt", "--out", "f.safetensors"],
    ["kv-sensitivity", "org/absent", "--data", "f.txt", "--target-bits", "4.5"],
]
ONE_BY_ONE = """
import contextlib, io, json, sys
from straightline.runtime.cli import main
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        code = main(command)
    print(json.dumps([code, said.getvalue()]))
"""


@pytest.fixture(scope="module")
def of_absent(offline: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the standard error of each command, all of one process: importing is what takes long."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "f.txt").write_text("a prompt\n")
    commands = [[str(folder / word) if word == "f.txt" else word for word in command] for command in ABSENT]
    ran = run(offline, "-c", ONE_BY_ONE, json.dumps(commands))
    assert ran.returncode == 0, ran.stderr
    said = map(json.loads, ran.stdout.splitlines())
    return {command[0]: (code, error) for command, (code, error) in zip(ABSENT, said, strict=True)}


@pytest.mark.parametrize("command", [command[0] for command in ABSENT])
def test_the_command_line_of_what_is_not_there(command: str, of_absent: dict[str, tuple[int, str]]) -> None:
    code, error = of_absent[command]
    assert code == 1
    *others, line = error.splitlines()
    assert not others or command == "serve"  # where mlx-lm's own lines come before it
    assert line.startswith("error: org/absent: is no folder here and cannot be had from the hub: "), line
