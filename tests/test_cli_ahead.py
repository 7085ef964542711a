"""Wishes that config.json, a file or the arguments alone refuse: no weight is loaded for them, and nobody listens."""

import socket
from pathlib import Path
from typing import Any

import checkpoints
import mlx_lm.server
import pytest
import toys
from mlx_lm import utils

from straightline.runtime.benchmark import models
from straightline.runtime.cli import main
from straightline.runtime.toy import VOCABULARY

SHAPE = toys.E6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
GENERATE = ["generate", "--model", "DIR/served", "--prompt", "Hello"]
SERVE = ["serve", "--model", "DIR/served", "--port", "0"]
TAPS = ["taps", "DIR/served", "--layers", "1", "--prompt-file", "DIR/p.jsonl", "--out", "DIR/f.safetensors"]
BITS = ["kv-sensitivity", "DIR/served", "--data", "DIR/p.jsonl", "--target-bits", "4.5", "--out", "DIR/kv.json"]
LAYERS = "HiddenTap: layers has 99; expected -1 to 6 (6 is after the final norm)"
NO_DRAFT = "DIR/absent: is no folder here and cannot be had from the hub: "
NO_ADAPTER = "DIR/absent: has no adapter_config.json; expected a folder of adapters as mlx_lm.lora saves them"
NO_FILE = "no generated file has the fingerprint "
KV_BITS = "kv_bits is 5 and kv_group_size 64; expected one of 2, 3, 4, 6, 8 bits in groups of 32, 64, 128"
GROUP = ": [0].group_size is 128; expected a divisor of the 64 numbers of a head in layer 0"
REFUSED = [
    ([*TAPS, "--layers", "3,99"], LAYERS),
    ([*TAPS, "--prompt-file", "DIR/late.jsonl"], "late.jsonl: line 2 has the token 9999; expected integers from 0 to "),
    (
        [*TAPS, "--chunk", "7", "--out", "DIR/old.safetensors"],
        "old.safetensors.index.json: was made with chunk 512, no",
    ),
    ([*BITS, "--group-size", "128"], f"--group-size{GROUP}"),
    ([*BITS, "--data", "DIR/late.jsonl"], "late.jsonl: line 2 has the token 9999; expected integers from 0 to "),
    (
        [*BITS, "--chunk", "7", "--out", "DIR/old.json"],
        "old.json.measurements.jsonl: was measured with chunk 128, not 7",
    ),
    ([*BITS, "--out", "DIR"], "DIR: is a folder; expected a file to write"),
    ([*BITS, "--svg", "DIR/p.jsonl/a.svg"], "DIR/p.jsonl: File exists"),
    (["verify", "DIR/unserved"], f"unserved: there is nothing to verify: {NO_FILE}"),
    (["bench", "DIR/unserved"], f"unserved: there is nothing to time: {NO_FILE}"),
    (["bench", "DIR/served", "--taps", "99"], LAYERS),
    (["bench", "DIR/served", "--svg", "DIR"], "DIR: is a folder; expected a file to write"),
    (["bench", "--random", "gemma4-e4b", "--taps", "99"], LAYERS.replace("6", "42")),
    ([*GENERATE, "--max-tokens", "0"], "--max-tokens is 0; expected 1 or more, or -1 for no limit"),
    ([*GENERATE, "--chat-template-config", "{a"], "--chat-template-config is not JSON ("),
    ([*GENERATE, "--prefill-step-size", "0"], "--prefill-step-size is 0; expected a whole number from 1"),
    ([*GENERATE, "--num-draft-tokens", "-1"], "--num-draft-tokens is -1; expected a whole number from 0"),
    ([*GENERATE, "--kv-bits", "5"], KV_BITS),
    ([*GENERATE, "--kv-bits", "8", "--kv-group-size", "128"], f"--kv-bits{GROUP}"),
    ([*GENERATE, "--adapter-path", "DIR/absent"], NO_ADAPTER),
    ([*GENERATE, "--draft-model", "DIR/absent"], NO_DRAFT),
    ([*GENERATE, "--draft-model", "DIR/cut"], "DIR/cut: checkpoint: norm.weight is absent; expected exactly the text"),
    ([*SERVE, "--model", "DIR/absent"], NO_DRAFT),
    ([*SERVE, "--model", "DIR/cut"], "DIR/cut: checkpoint: norm.weight is absent; expected exactly the text model"),
    ([*SERVE, "--model", "DIR/other"], "mlx_lm.server: Model type gemma9 not supported."),
    ([*SERVE, "--adapter-path", "DIR/absent"], NO_ADAPTER),
    ([*SERVE, "--draft-model", "DIR/absent"], NO_DRAFT),
    (
        [*SERVE, "--kv-config", "DIR/absent"],
        "DIR/absent: cannot be read (No such file or directory); expected a kv_con",
    ),
    ([*SERVE, "--kv-bits", "5"], KV_BITS),
    ([*SERVE, "--prefill-step-size", "0"], "--prefill-step-size is 0; expected a whole number from 1"),
    ([*SERVE, "--port", "TAKEN"], "serve: it cannot listen there (Address already in use); choose another --host or"),
]


def without_norm(weights: checkpoints.Weights) -> checkpoints.Weights:
    return {name: value for name, value in weights.items() if name != "model.norm.weight"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("ahead")
    checkpoints.publish(root / "unserved", toys.D6)
    checkpoints.publish(root / "cut", SHAPE, change=without_norm)
    checkpoints.publish(root / "other", SHAPE)
    (root / "other" / "config.json").write_text('{"model_type": "gemma9"}')
    (root / "p.jsonl").write_text('{"tokens": [1, 2]}\n')
    (root / "late.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [9999]}\n')
    with checkpoints.with_files(root, served=SHAPE):
        how = {"DIR/f.safetensors": "DIR/old.safetensors"}
        assert main([how.get(word, word).replace("DIR", str(root)) for word in TAPS]) == 0
        assert main([word.replace("DIR/kv.json", "DIR/old.json").replace("DIR", str(root)) for word in BITS]) == 0
        yield root


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_no_weights_are_loaded(
    folders: Path,
    command: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_model = utils.load_model

    def without_weights(*arguments: Any, lazy: bool = False, **named: Any) -> Any:
        if not lazy:
            pytest.fail("weights were loaded")
        return load_model(*arguments, lazy=lazy, **named)

    monkeypatch.setattr(utils, "load_model", without_weights)
    monkeypatch.setattr(models, "build", lambda *_, **__: pytest.fail("weights were made"))
    monkeypatch.setattr(mlx_lm.server, "run", lambda *_: pytest.fail("it was about to listen"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main([word.replace("DIR", str(folders)).replace("TAKEN", port) for word in command]) == 1
    error = capsys.readouterr().err.replace(str(folders), "DIR")
    assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
