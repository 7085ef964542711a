"""`straightline generate` and `serve`: mlx-lm's own programs on a specialized model, with every flag of theirs."""

import importlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import toys

from straightline.runtime import load
from straightline.runtime.cli import main
from straightline.runtime.toy import VOCABULARY

SHAPE = toys.E6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
DENSE = toys.D6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
PROMPT = ["--prompt", "a prompt that is longer than the window", "--max-tokens", "24", "--verbose", "False"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two Gemma 4 checkpoints with files in the user's cache, and one of another family."""
    root = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRAIGHTLINE_CACHE", str(root / "cache"))
        for name, config in (("shared", SHAPE), ("dense", DENSE)):
            checkpoints.publish(root / name, config)
            load(root / name, generate=True)
        yield root


def plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What mlx-lm's own program prints."""
    program: Any = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *arguments])
    program.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["shared", "dense"])
def test_the_same_text_as_mlx_lm(
    folders: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(folders / name), *PROMPT]
    expected = plain(capsys, monkeypatch, *arguments)
    assert main(["generate", *arguments]) == 0
    found = capsys.readouterr()
    assert found.out == expected
    (line,) = [line for line in found.err.splitlines() if line.startswith("straightline: ")]
    assert ", 0 by mlx-lm's code" in line and " 0 calls generated" not in line, line


def test_speculation_past_the_window_is_plain_greedy_text(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is another model, so tokens are rejected; mlx-lm alone goes wrong there once its rings are full."""
    arguments = ["--model", str(folders / "shared"), *PROMPT]
    expected = plain(capsys, monkeypatch, *arguments)
    assert main(["generate", *arguments, "--draft-model", str(folders / "dense"), "--num-draft-tokens", "4"]) == 0
    found = capsys.readouterr()
    assert found.out == expected
    reports = [line for line in found.err.splitlines() if line.startswith("straightline: ")]
    assert len(reports) == 2 and all(line.endswith(", 0 by mlx-lm's code") for line in reports), reports


def test_a_draft_of_another_family_loads_as_usual(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llama(folders / "llama")
    arguments = ["--model", str(folders / "shared"), *PROMPT]
    assert main(["generate", *arguments, "--draft-model", str(folders / "llama")]) == 0
    reports = [line for line in capsys.readouterr().err.splitlines() if line.startswith("straightline: ")]
    assert len(reports) == 1 and "shared" in reports[0]


def write_llama(folder: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
    }
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    checkpoints.write(folder, config, dict(tree_flatten(model.parameters())))


def test_quantized_caches(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(folders / "shared"), *PROMPT]
    assert main([*arguments, "--kv-bits", "8", "--quantized-kv-start", "0"]) == 0
    by_flag = capsys.readouterr()
    reasons = [line for line in by_flag.err.splitlines() if line.startswith("straightline:   ")]
    assert reasons and all("cache 0 is QuantizedRingCache, file expects" in line for line in reasons), reasons
    entries = [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(3)]
    (tmp_path / "kv.json").write_text(json.dumps(entries))
    assert main([*arguments, "--kernels", "--kv-config", str(tmp_path / "kv.json")]) == 0
    assert capsys.readouterr().out == by_flag.out
    (tmp_path / "kv.json").write_text(json.dumps([*entries, entries[0]]))
    assert main([*arguments, "--kv-config", str(tmp_path / "kv.json")]) == 1
    expected = "kv_config.json: [3].layer_idx is 0 a second time; expected each layer once\n"
    assert capsys.readouterr().err == f"error: {folders / 'shared'}: {expected}"


def test_mlx_lm_is_left_as_it_was(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program: Any = importlib.import_module("mlx_lm.generate")
    before = program.load, sys.argv
    assert main(["generate", "--model", str(folders / "nothing")]) == 1
    assert (program.load, sys.argv) == before
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folders / 'nothing'}: is no folder here and cannot be had from the hub: ")
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--nonsense"])
    assert stopped.value.code == 2
    assert "straightline generate: error: unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_a_server_refuses_a_draft_for_shared_kv(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = str(folders / "shared")
    assert main(["serve", "--model", shared, "--draft-model", str(folders / "dense")]) == 1
    assert capsys.readouterr().err == (
        f"error: serve: {shared} shares K/V between layers, and mlx-lm's server cannot tell its caches from those "
        "of a draft model; leave --draft-model out, or use straightline generate\n"
    )


def test_a_server_answers_and_says_what_served(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "straightline.runtime", "serve", "--model", str(folders / "shared")]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & would ignore it
    )
    try:
        body = json.dumps({"prompt": PROMPT[1], "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        text = json.loads(answer(process, request))["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    reports = [line for line in errors.splitlines() if line.startswith("straightline: ")]
    assert len(reports) == 1 and reports[0].endswith(", 0 by mlx-lm's code"), errors
    arguments = ["--model", str(folders / "shared"), *PROMPT[:3], "8", "--ignore-chat-template", *PROMPT[4:]]
    assert text == plain(capsys, monkeypatch, *arguments).rstrip("\n")


def answer(process: "subprocess.Popen[str]", request: urllib.request.Request) -> bytes:
    for _ in range(200):
        assert process.poll() is None, process.communicate()[1]
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                found: bytes = response.read()
                return found
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not answer")
