"""`straightline generate` runs mlx-lm's program on the loop of runtime/decoding: the same text for the same flags."""

import importlib
import sys
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import pytest
import toys
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from straightline.runtime import decoding, load
from straightline.runtime.cli import main
from straightline.runtime.toy import VOCABULARY

PROMPT = ["--prompt", "a prompt that is longer than the window", "--max-tokens", "24"]
SHAPE = toys.E6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
DENSE = toys.D6 | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("loop")
    with checkpoints.with_files(root, shared=SHAPE, dense=DENSE):
        yield root


def plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What mlx-lm's own program prints."""
    program: Any = importlib.import_module("mlx_lm.generate")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["mlx_lm.generate", *arguments])
        program.main()
    return capsys.readouterr().out


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each `stream` that is asked for."""
    seen: list[dict[str, Any]] = []
    stream = decoding.stream

    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append(options)
        return stream(*arguments, **options)

    monkeypatch.setattr(decoding, "stream", recorded)
    return seen


FLAGS: dict[str, list[str]] = {
    "greedy": [],
    "sampled": ["--temp", "1.0", "--top-p", "0.9", "--min-p", "0.01", "--top-k", "50", "--seed", "7"],
    "xtc": ["--temp", "1.0", "--xtc-probability", "0.5", "--xtc-threshold", "0.05", "--seed", "3"],
    "prefill": ["--prefill-step-size", "5", "--ignore-chat-template"],
    "stop": ["--temp", "1.3", "--seed", "1", "--extra-eos-token", "e", "a", "i", "o", "n", "t"],
    "quantized": ["--kv-bits", "8", "--quantized-kv-start", "12"],
    "sized": ["--max-kv-size", "64"],
    "one token": ["--max-tokens", "1"],
}


@pytest.mark.parametrize("name", FLAGS)
def test_the_same_text(
    name: str,
    folders: Path,
    used: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # mlx-lm alone cannot quantize rings, so there its program runs on our model.
    arguments = ["--model", str(folders / "dense"), *PROMPT, *FLAGS[name], "--verbose", "False"]
    if name == "quantized":
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "stream", importlib.import_module("mlx_lm.generate").stream_generate)
            assert main(["generate", *arguments]) == 0
        expected = capsys.readouterr().out
    else:
        expected = plain(capsys, monkeypatch, *arguments)
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == expected
    assert main(["generate", *arguments, "--steps", "3", "--overlap"]) == 0
    assert capsys.readouterr().out == expected
    assert not {"steps", "overlap"} & set(used[0])
    assert (used[1]["steps"], used[1]["overlap"], len(used)) == (3, True, 2)


def test_verbose_says_the_same_but_for_rates(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(folders / "shared"), *PROMPT]
    expected = plain(capsys, monkeypatch, *arguments).splitlines()
    assert main(["generate", *arguments]) == 0
    found = capsys.readouterr().out.splitlines()
    assert len(found) == len(expected) and found[:-3] == expected[:-3]
    assert [line.partition(",")[0] for line in found[-3:-1]] == [line.partition(",")[0] for line in expected[-3:-1]]


def test_a_prompt_cache_of_a_file(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(folders / "dense")
    import mlx_lm

    model, tokenizer = mlx_lm.load(where)
    caches = make_prompt_cache(model)
    model(mx.array([tokenizer.encode("What came before.")]), cache=caches)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches, {"model": where, "tokenizer_config": "{}"})
    arguments = ["--model", where, *PROMPT, "--prompt-cache-file", file, "--verbose", "False"]
    expected = plain(capsys, monkeypatch, *arguments)
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == expected


@pytest.fixture
def prompt_file(folders: Path, tmp_path: Path) -> list[str]:
    """Flags for a prompt cache of the small model with shared K/V, as mlx_lm.cache_prompt saves it."""
    import mlx_lm

    where = str(folders / "shared")
    model, tokenizer = mlx_lm.load(where)
    caches = make_prompt_cache(model)
    model(mx.array([tokenizer.encode("What came before.")]), cache=caches)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches, {"model": where, "tokenizer_config": "{}"})
    return ["generate", "--model", where, *PROMPT, "--verbose", "False", "--prompt-cache-file", file]


def test_a_prompt_cache_of_a_file_is_quantized(
    folders: Path, prompt_file: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx-lm's own ring, which its file names, raises there."""
    bits = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]
    assert main([*prompt_file, *bits]) == 0
    found = capsys.readouterr().out.strip()
    model, tokenizer = load(folders / "shared")
    caches = model.make_cache()
    model(mx.array([tokenizer.encode("What came before.")]), cache=caches)
    how: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    answers = decoding.stream(model, tokenizer, PROMPT[1], int(PROMPT[3]), prompt_cache=caches, **how)
    assert found == "".join(one.text for one in answers).strip()
    assert {type(one).__name__ for one in caches} == {"QuantizedRingCache", "QuantizedGrowingCache"}


@pytest.mark.parametrize("flag", ["--draft-model", "--kv-config"])
def test_what_the_caches_of_a_file_cannot_do(
    flag: str, folders: Path, prompt_file: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Full rings of mlx-lm go on with wrong rows when a draft is taken back, and it would not say so."""
    assert main([*prompt_file, flag, str(folders / "dense") if flag == "--draft-model" else "auto"]) == 1
    assert f"error: {flag} and --prompt-cache-file are both given" in capsys.readouterr().err


def test_a_draft_model_has_mlx_lms_loop(
    folders: Path, used: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(folders / "dense"), *PROMPT, "--draft-model", str(folders / "shared")]
    assert main(arguments) == 0
    assert "straightline generate: with a draft model, mlx-lm's own loop runs\n" in capsys.readouterr().err
    assert not used


def test_bad_steps(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(folders / "dense"), "--steps", "0"]) == 1
    assert capsys.readouterr().err == "error: --steps is 0; expected a whole number from 1\n"
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--steps", "many"])
    assert stopped.value.code == 2
    assert "straightline generate: error: argument --steps: invalid int value: 'many'" in capsys.readouterr().err


def test_mlx_lm_is_left_as_it_was(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program: Any = importlib.import_module("mlx_lm.generate")
    before = program.stream_generate, program.load
    assert main(["generate", "--model", str(folders / "dense"), *PROMPT, "--image", "absent.png"]) == 1
    assert f"error: mlx_lm.generate: The model {folders}/dense does not take images." in capsys.readouterr().err
    assert (program.stream_generate, program.load) == before
