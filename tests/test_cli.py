"""The command line: help and usage without MLX, exit codes, errors in one sentence, and `explain`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import pytest
import toys

from straightline.codegen.config import read_config
from straightline.codegen.target import read_target
from straightline.runtime import make_cache, specialize
from straightline.runtime.cli import COMMANDS, PASSING_ON, main
from straightline.runtime.commands.differences import differences, nearest

E4B = read_target("gemma4-e4b").spec


def published_config(name: str = "gemma4_e4b") -> dict[str, Any]:
    path = Path(__file__).parents[1] / f"codegen/specs/{name}.config.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def folder_of(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"], ["verify"], ["show", "nonsense"]])
def test_help_and_errors_wait_for_neither_mlx_nor_mlx_lm(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom straightline.runtime.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('mlx', 'mlx.core', 'mlx_lm', 'transformers', 'jinja2') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "[]", ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_module_runs_as_the_script_does() -> None:
    command = [sys.executable, "-m", "straightline.runtime", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert all(name in ran.stdout for name in (*COMMANDS, *PASSING_ON))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["explain"],
        ["explain", "a", "--random", "gemma4-e4b"],
        ["verify"],
        ["verify", "folder", "--layers", "4"],
        ["verify", "--random", "gemma4-e4b", "--steps", "0"],
        ["verify", "--random", "gemma4-e4b", "--steps", "99999999999999999999"],
        ["verify", "--random", "gemma4-e4b", "--seed", "-1"],
        ["verify", "--random", "gemma4-e4b", "--seed", "99999999999999999999999"],
        ["show"],
        ["show", "gemma4-e4b", "--taps", "5,5"],
        ["taps", "folder"],
        ["taps", "folder", "--layers", "1", "--prompt-file", "f.txt", "--out", "f.bin"],
        ["taps", "folder", "--layers", "1", "--prompt-file", "f.txt", "--out", "f.safetensors", "--shard-mb", "nan"],
        ["taps", "folder", "--layers", "1", "--prompt-file", "f.txt", "--out", "f.safetensors", "--shard-mb", "inf"],
        ["taps", "folder", "--layers", "one", "--prompt-file", "f.txt", "--out", "f.safetensors"],
        ["kv-sensitivity", "folder", "--data", "f.txt", "--target-bits", "9"],
        ["kv-sensitivity", "folder", "--data", "f.txt", "--target-bits", "4", "--candidates", "4,5"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error


def test_errors_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: is no folder with a config.json; expected one, a hub id (owner/name), or one of "
        "gemma4-12b, gemma4-12b-optiq, gemma4-26b, gemma4-26b-optiq, gemma4-31b, gemma4-e2b, "
        "gemma4-e4b, gemma4-e4b-optiq\n"
    )
    assert main(["explain", ""]) == 1
    assert capsys.readouterr().err.startswith("error: : is no folder with a config.json; expected one, a hub id")
    assert main(["explain", folder_of(tmp_path, {"model_type": "llama"})]) == 1
    assert capsys.readouterr().err.startswith('error: config.json: model_type is "llama"; expected "gemma4" or')
    assert main(["verify", "--random", "gemma4-1b"]) == 1
    assert capsys.readouterr().err.startswith('error: target "gemma4-1b" is unknown; expected one of gemma4-12b, ')


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("straightline.runtime.commands.explain.read_subject", interrupt)
    assert main(["explain", "gemma4-e4b"]) == 130


def test_differences_are_named_one_by_one() -> None:
    config = published_config("gemma4_12b")
    config["text_config"] |= {"sliding_window": 2048, "intermediate_size": 15000}
    name, found = nearest(read_config(config))
    assert name == "gemma4-12b"
    assert found == (
        "sliding_window is 2048, gemma4-12b has 1024",
        "intermediate_size of layers 0-47 is 15000, gemma4-12b has 15360",
    )


def test_differences_of_kind_head_and_experts() -> None:
    config = published_config()
    config["text_config"]["layer_types"][5] = "sliding_attention"
    config["text_config"]["tie_word_embeddings"] = False
    config.pop("tie_word_embeddings", None)
    found = differences(read_config(config), E4B, "gemma4-e4b")
    assert found == (
        "tie_word_embeddings is false, gemma4-e4b has true",
        "attention of layer 5 is sliding, gemma4-e4b has full",
    )
    assert differences(E4B, E4B, "gemma4-e4b") == ()
    twelve, moe = read_target("gemma4-12b").spec, read_target("gemma4-26b").spec
    assert "enable_moe_block is false, gemma4-26b has true" in differences(twelve, moe, "gemma4-26b")


def test_every_published_target_is_its_own_nearest() -> None:
    for name in ("gemma4-12b", "gemma4-26b", "gemma4-31b", "gemma4-e2b", "gemma4-e4b"):
        assert nearest(read_target(name).spec) == (name, ())


def test_explain_a_published_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gemma4-e4b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["served"] and found["fingerprint"] == E4B.fingerprint
    assert [one["name"] for one in found["files"]] == ["gemma4-e4b", "gemma4-e4b-optiq"]
    paths = {call["what"]: (call["path"], call["file"] or call["reason"]) for call in found["calls"]}
    assert paths == {
        "no cache (scoring)": ("generated", "gemma4-e4b"),
        "plain caches (generate, serve)": ("generated", "gemma4-e4b"),
        "batch caches (batch_generate, serve)": ("generated", "gemma4-e4b"),
        "quantized caches (gemma4-e4b-optiq)": ("generated", "gemma4-e4b-optiq"),
        "batch of those (gemma4-e4b-optiq)": ("generated", "gemma4-e4b-optiq"),
        "mlx-lm's --kv-bits 8": (
            "monolith",
            "cache 0 has 8 bits in groups of 64, file expects 4 in groups of 64",
        ),
        "rollback caches (speculation)": ("generated", "gemma4-e4b"),
        "rollback caches, quantized (gemma4-e4b-optiq)": ("generated", "gemma4-e4b-optiq"),
        "input_embeddings (images)": ("monolith", "input_embeddings are given, file expects token ids"),
        "per_layer_inputs": ("monolith", "per_layer_inputs are given, file computes its own"),
        "training (gradients)": (
            "monolith",
            "the model is in training mode; call model.eval() for the generated path",
        ),
    }


def test_explain_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.publish(
        tmp_path,
        toys.E6,
        quantize={"group_size": 64, "bits": 4},
        quantization={"group_size": 64, "bits": 4},
        dtype=mx.bfloat16,
    )
    assert main(["explain", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path.name} (gemma4)"
    assert "    num_hidden_layers is 6, gemma4-e4b has 42" in lines
    assert f"  to make one: in Python: load('{tmp_path}', generate=True); in a checkout: " in "\n".join(lines)
    assert any(line.startswith("  4-bit affine, groups of 64: ") for line in lines), lines
    assert any(line.startswith("  bfloat16: ") for line in lines), lines
    assert lines[lines.index("Calls") + 1].startswith("  every call  monolith  no generated file has the fingerprint ")


def test_explain_a_folder_with_an_odd_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No escape sequence reaches the terminal, and the command can be pasted."""
    folder = tmp_path / "my gemma"
    checkpoints.publish(folder, toys.D6)
    assert main(["explain", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"./regen.sh --from '{folder}' --name my-gemma" in out or "pip install" in out
    odd = folder.rename(tmp_path / "my \x1b[31m gemma")
    assert main(["explain", str(odd)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("'my \\x1b[31m gemma' (gemma4)\n") and "\x1b" not in out


def test_explain_sees_a_shard_that_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.publish(tmp_path, toys.D6)
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert main(["explain", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: model.safetensors: cannot be read (")


def test_explain_names_the_shard_that_is_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.publish(tmp_path, toys.D6, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert main(["explain", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["served"] and found["checkpoint_fault"] == (
        "model-00002-of-00003.safetensors is absent; expected every file that model.safetensors.index.json names"
    )


def test_explain_says_what_is_wrong_with_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drop(weights: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in weights.items() if name != "model.norm.weight"}

    checkpoints.publish(tmp_path, toys.D6, change=drop)
    assert main(["explain", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["served"]
    assert found["checkpoint_fault"].startswith("checkpoint: norm.weight is absent; expected exactly the text model")


def test_explain_tells_what_really_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calls that explain lists, made: the same path, for the same reason."""
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    model = specialize(checkpoints.publish(tmp_path / "checkpoint", toys.E6), generate=True)
    assert main(["explain", str(tmp_path / "checkpoint"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["where"] for one in found["files"]] == ["user"]
    said = {call["what"].partition(" (")[0]: (call["path"], call["reason"]) for call in found["calls"]}
    ids = toys.tokens(1, 3)
    eight = [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(3)]
    made: dict[str, dict[str, Any]] = {
        "no cache": {"cache": None},
        "plain caches": {"cache": model.make_cache()},
        "mlx-lm's --kv-bits 8": {"cache": make_cache(model, eight)},
        "rollback caches": {"cache": make_cache(model, rollback=True)},
        "input_embeddings": {"input_embeddings": mx.zeros((1, 3, 64))},
        "per_layer_inputs": {"per_layer_inputs": mx.zeros((1, 3, 6, 16))},
    }
    for what, how in made.items():
        model(ids, **how)
        assert model.dispatch.last == said[what], what
    model.train()
    model(ids)
    assert model.dispatch.last == said["training"]
