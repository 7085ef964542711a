"""`straightline generate` and `serve`: mlx-lm's own programs on a specialized model, with every flag of theirs."""

import importlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import toys

from straightline.runtime import load
from straightline.runtime.cli import main
from straightline.runtime.commands.loader import split
from straightline.runtime.toy import VOCABULARY

SHAPE = toys.E6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
DENSE = toys.D6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
PROMPT = ["--prompt", "a prompt that is longer than the window", "--max-tokens", "24", "--verbose", "False"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two Gemma 4 checkpoints with files in the user's cache, and one of another family."""
    root = tmp_path_factory.mktemp("generate")
    with checkpoints.with_files(root, shared=SHAPE, dense=DENSE):
        yield root


def plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What mlx-lm's own program prints."""
    program: Any = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *arguments])
    program.main()
    return capsys.readouterr().out


def reports_in(errors: str) -> list[str]:
    """What is said at the end of each model."""
    return [line for line in errors.splitlines() if line.startswith("straightline: ") and " calls generated " in line]


@pytest.mark.parametrize("name", ["shared", "dense"])
def test_the_same_text_as_mlx_lm(
    folders: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(folders / name), *PROMPT]
    expected = plain(capsys, monkeypatch, *arguments)
    assert main(["generate", *arguments]) == 0
    found = capsys.readouterr()
    assert found.out == expected
    (line,) = reports_in(found.err)
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
    reports = reports_in(found.err)
    assert len(reports) == 2 and all(line.endswith(", 0 by mlx-lm's code") for line in reports), reports


def test_a_draft_of_another_family_loads_as_usual(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llama(folders / "llama")
    arguments = ["--model", str(folders / "shared"), *PROMPT]
    assert main(["generate", *arguments, "--draft-model", str(folders / "llama")]) == 0
    reports = reports_in(capsys.readouterr().err)
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
    expected = "error: kv.json: [3].layer_idx is 0 a second time; expected each layer once\n"
    assert capsys.readouterr().err == expected


def test_another_family_runs_as_usual_and_that_is_said(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(folders / "llama")
    arguments = ["--model", str(folders / "llama"), *PROMPT]
    expected = plain(capsys, monkeypatch, *arguments)
    assert main(["generate", *arguments]) == 0
    found = capsys.readouterr()
    said = f'straightline: {folders / "llama"}: model_type is "llama", not Gemma 4; mlx-lm\'s own code runs it'
    assert found.out == expected and said in found.err.splitlines() and reports_in(found.err) == []


def test_newer_layouts_load_here_too(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What mlx-lm's own loader does not understand, although its program adds a key of its own to the config."""
    config = DENSE | {"global_head_dim": 128}
    checkpoints.publish(tmp_path, config)
    load(tmp_path, generate=True)
    assert main(["generate", "--model", str(tmp_path), *PROMPT]) == 0
    expected = capsys.readouterr().out
    text = json.loads((tmp_path / "config.json").read_text())
    heads = {"head_dim": text["text_config"].pop("global_head_dim"), "num_key_value_heads": 1}
    full = [index for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    text["text_config"]["per_layer_config"] = {f"{index:02}": heads for index in full}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert main(["generate", "--model", str(tmp_path), *PROMPT]) == 0
    found = capsys.readouterr()
    assert found.out == expected and ", 0 by mlx-lm's code" in found.err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "FOLDER/config.json: cannot be read (No such file or dire"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: is not JSON ("),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "gemma9"}'),
            "PROGRAM: Model type gemma9 not supported.",
        ),
        (
            lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
            "FOLDER: has no tokenizer; expected tokenizer.json beside config.json",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "FOLDER: has neither model*.safetensors nor model.safetensors.index.json; expected the weights beside",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"),
            "FOLDER: model.safetensors: cannot be read (",
        ),
    ],
    ids=["no config", "damaged config", "unknown family", "no tokenizer", "no weights", "damaged weights"],
)
@pytest.mark.parametrize("program", ["generate", "serve"])
def test_what_cannot_be_loaded_is_said_in_one_sentence(
    folders: Path, tmp_path: Path, program: str, spoil: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.publish(tmp_path, DENSE)
    spoil(tmp_path)
    if program == "generate":
        code, said = main([program, "--model", str(tmp_path), "--prompt", "Hello"]), capsys.readouterr().err
    else:  # a process of its own: its threads may outlive what failed
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "straightline.runtime", program, "--model", str(tmp_path), "--port", str(port)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        code, said = ran.returncode, ran.stderr
    assert code == 1, said
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    found = line.removeprefix("error: ").replace(str(tmp_path), "FOLDER").replace("mlx_lm.generate", "PROGRAM")
    assert found.replace("mlx_lm.server", "PROGRAM").startswith(message), line


@pytest.mark.parametrize("port", ["65536", "99999", "-1"])
def test_a_port_that_there_is_not(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "any", f"--port={port}"]) == 1
    assert capsys.readouterr().err == f"error: serve: --port is {port}; expected 0 to 65535\n"


def test_a_port_that_is_taken(folders: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "straightline.runtime", "serve", "--model", str(folders / "shared")]
        more = ["--port", str(taken.getsockname()[1])]
        ran = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)
    said = "error: serve: it cannot listen there (Address already in use); choose another --host or --port"
    assert said in ran.stderr.splitlines() and ran.returncode != 0


@pytest.mark.parametrize("program", ["generate", "serve"])
def test_help_has_our_flags_before_mlx_lms(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([program, "--help"])
    assert stopped.value.code == 0
    ours, _, theirs = capsys.readouterr().out.partition(f"usage: straightline {program} ")
    assert "--kv-config FILE" in ours and "--kernels" in ours and "--draft-model" in theirs
    assert ("--steps N" in ours and "--overlap" in ours) == (program == "generate")


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


@pytest.mark.parametrize(("target", "draft"), [("shared", "dense"), ("dense", "shared"), ("shared", "shared")])
def test_a_server_with_a_draft_model_gives_plain_greedy_text(
    folders: Path, target: str, draft: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the window; then a second turn, a prompt that leaves the first far behind, and one that is kept as it is."""
    arguments = ["--model", str(folders / target), "--draft-model", str(folders / draft), "--num-draft-tokens", "4"]
    with server(*arguments) as ask:
        first = ask(PROMPT[1], 24)
        turns = [(PROMPT[1], 24), (PROMPT[1] + first + " and so on", 16), (PROMPT[1][:9] + "quite another", 12)]
        turns += [(PROMPT[1] + first[:-1], 8), (PROMPT[1], 24)]
        found = [first, *(ask(*turn) for turn in turns[1:])]
        reports = ask.stop()
    expected = [plain_text(folders / target, prompt, most, capsys, monkeypatch) for prompt, most in turns]
    assert found == expected
    assert len(reports) == 2 and all(line.endswith(", 0 by mlx-lm's code") for line in reports), reports


def test_prompts_that_end_mlx_lms_server(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without tokens, and one that is all of an earlier one but the last token: below the window and past it."""
    prompts = ["short", "shor", PROMPT[1], PROMPT[1][:-1]]
    with server("--model", str(folders / "shared")) as ask:
        with pytest.raises(AssertionError, match="the prompt has no tokens; expected one or more"):
            ask("", 4)
        found = [ask(prompt, 8) for prompt in prompts]
        assert ask.stop()
    assert found == [plain_text(folders / "shared", prompt, 8, capsys, monkeypatch) for prompt in prompts]


def test_a_request_may_name_a_draft_model_and_any_number_of_its_tokens(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server("--model", str(folders / "shared")) as ask:
        draft = {"draft_model": str(folders / "dense")}
        found = [ask(PROMPT[1], 60, **draft), ask(PROMPT[1], 60), ask(PROMPT[1], 60, **draft, num_draft_tokens=40)]
        assert ask.stop()
    assert found == [plain_text(folders / "shared", PROMPT[1], 60, capsys, monkeypatch)] * 3


def plain_text(
    folder: Path, prompt: str, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    wanted = ["--prompt", prompt, "--max-tokens", str(most), "--verbose", "False", "--ignore-chat-template"]
    return plain(capsys, monkeypatch, "--model", str(folder), *wanted).removesuffix("\n")


class Ask:
    """A running `straightline serve`: called with a prompt, its answer's text."""

    def __init__(self, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "straightline.runtime", "serve", *arguments, "--port", str(port)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & would ignore it
        )

    def __call__(self, prompt: str, most: int, **more: Any) -> str:
        body = json.dumps({"prompt": prompt, "max_tokens": most, "temperature": 0} | more).encode()
        request = urllib.request.Request(self.url, body, {"content-type": "application/json"})
        text: str = json.loads(answer(self.process, request))["choices"][0]["text"]
        return text

    def stop(self) -> list[str]:
        """What it says at the end of the models that served. An interrupt is how it is meant to end."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=30)
        assert (self.process.returncode, "terminate called" in errors) == (0, False), errors
        return reports_in(errors)


@contextmanager
def server(*arguments: str) -> Iterator[Ask]:
    ask = Ask(*arguments)
    try:
        yield ask
    finally:
        ask.process.kill()


def test_a_server_answers_and_says_what_served(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server("--model", str(folders / "shared")) as ask:
        text = ask(PROMPT[1], 8)
        reports = ask.stop()
    assert len(reports) == 1 and reports[0].endswith(", 0 by mlx-lm's code"), reports
    assert text == plain_text(folders / "shared", PROMPT[1], 8, capsys, monkeypatch)


def answer(process: "subprocess.Popen[str]", request: urllib.request.Request) -> bytes:
    for _ in range(200):
        assert process.poll() is None, process.communicate()[1]
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                found: bytes = response.read()
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not answer")


@pytest.mark.parametrize(("flag", "kernels"), [((), None), (("--kernels",), True), (("--no-kernels",), False)])
def test_kernels_may_be_asked_for_and_declined(flag: tuple[str, ...], kernels: bool | None) -> None:
    wishes, rest = split(["--model", "m", *flag, "--temp", "0"], "straightline generate")
    assert (wishes.kernels, rest) == (kernels, ["--model", "m", "--temp", "0"])
