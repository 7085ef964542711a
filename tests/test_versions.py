"""The supported range of MLX and mlx-lm: stated once more in code than in pyproject.toml, and checked (B64)."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import Hooked, assert_same, file_of
from mlx_lm.models import gemma4_text

from straightline.codegen import upstream
from straightline.runtime import HiddenTap, drift, specialize, versions
from straightline.runtime.cli import main

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def test_the_range_is_that_of_pyproject() -> None:
    stated = {re.split("[<>=]", one)[0]: re.sub("^[a-z-]+", "", one) for one in PROJECT["dependencies"]}
    assert {name: stated[name] for name in versions.SUPPORTED} == versions.SUPPORTED


@pytest.mark.parametrize("found", ["0.32.1", "0.33.0", "1.0"])
def test_another_version_is_refused_in_one_sentence(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found if name == "mlx-lm" else "0.32.4")
    with pytest.raises(ImportError) as caught:
        versions.check_versions()
    expected = f"mlx-lm is {found}; straightline is made for mlx-lm>=0.32.2,<0.33: pip install 'mlx-lm>=0.32.2,<0.33'"
    assert str(caught.value) == expected


@pytest.mark.parametrize("found", ["0.32.2", "0.32.99"])
def test_the_edges_of_the_range_are_in_it(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        versions, "version", lambda name: seen.append(name) or (found if name == "mlx-lm" else "0.32.4")
    )
    versions.check_versions()
    assert seen == ["mlx", "mlx-lm"]


@pytest.fixture
def another_mlx_lm(tmp_path: Path) -> dict[str, str]:
    """An environment in which mlx-lm says that it is 0.33.0."""
    folder = tmp_path / "mlx_lm-0.33.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-lm\nVersion: 0.33.0\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


SENTENCE = "mlx-lm is 0.33.0; straightline is made for mlx-lm>=0.32.2,<0.33: pip install 'mlx-lm>=0.32.2,<0.33'"


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-m", "straightline.runtime"], [str(Path(sys.executable).parent / "straightline")]],
    ids=["module", "script"],
)
@pytest.mark.parametrize("arguments", [["--help"], ["explain", "gemma4-e4b"], ["serve"]], ids=" ".join)
def test_the_command_says_it_in_one_sentence(
    command: list[str], arguments: list[str], another_mlx_lm: dict[str, str]
) -> None:
    ran = subprocess.run([*command, *arguments], env=another_mlx_lm, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"error: {SENTENCE}\n")


@pytest.mark.parametrize("module", ["straightline.runtime", "straightline.runtime.ops"])
def test_an_import_is_refused_as_imports_are(module: str, another_mlx_lm: dict[str, str]) -> None:
    program = f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=another_mlx_lm, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{SENTENCE}\n", "")


@pytest.fixture
def other_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A lock of another mlx-lm than the installed one, whose functions are to be edited."""
    path = tmp_path / "upstream.lock"
    path.write_text(upstream.LOCK.read_text().replace(f"mlx-lm {metadata.version('mlx-lm')}", "mlx-lm 0.32.1"))
    monkeypatch.setattr(upstream, "LOCK", path)
    drift.changed_upstream.cache_clear()
    yield path
    drift.changed_upstream.cache_clear()


def edit(path: Path, *starts: str) -> None:
    """Another digest for the lines that start so."""
    lines = path.read_text().splitlines(keepends=True)
    edited = [re.sub("[0-9a-f]{16}", "0" * 16, one) if one.strip().startswith(starts) else one for one in lines]
    assert edited != lines
    path.write_text("".join(edited))


def test_a_release_in_the_range_that_computes_otherwise(other_lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B64: its own code serves, and the reason names the function; `explain` says so too."""
    edit(other_lock, "models/gemma4_text.py", "Router.__call__")
    model = specialize(toys.build(toys.M6), file_of(toys.M6))
    model(toys.tokens(1, 3))
    assert model.dispatch.counts == {"generated": 0, "monolith": 1}
    assert re.fullmatch(
        r"mlx_lm/models/gemma4_text\.py: Router\.__call__ changed in mlx-lm [0-9.]+; review templates/experts\.py\.j2, "
        r"then \./regen\.sh --accept-upstream",
        model.dispatch.reason,
    )
    assert main(["explain", "gemma4-26b", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (call,) = found["calls"]
    assert not found["served"]
    assert (call["path"], call["reason"]) == ("monolith", model.dispatch.reason)


def test_a_release_in_the_range_that_computes_the_same(other_lock: Path) -> None:
    """Other lines in those files, and another loop, which the file has nothing to do with."""
    edit(other_lock, "models/gemma4_text.py", "generate.py", "generate_step")
    model = specialize(toys.build(toys.M6), file_of(toys.M6), strict=True)
    model(toys.tokens(1, 3))
    assert model.dispatch.counts == {"generated": 1, "monolith": 0}


def test_a_release_in_the_range_without_libcst(other_lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(other_lock, "models/gemma4_text.py")
    file = file_of(toys.D6)
    monkeypatch.setitem(sys.modules, "libcst", None)
    model = specialize(toys.build(toys.D6), file)
    said = r"mlx_lm/models changed in mlx-lm [0-9.]+; expected 0\.32\.1, or the codegen extra"
    assert re.fullmatch(said, model.dispatch.reason)


def newer_loop() -> Any:
    """The inner model of an mlx-lm whose loop gives its layers one more keyword."""
    source = textwrap.dedent(inspect.getsource(gemma4_text.Gemma4TextModel.__call__))
    newer = source.replace("offset=offset,", "offset=offset, gain=0.5,")
    assert newer != source
    scope = dict(vars(gemma4_text))
    exec(newer, scope)
    return type("NewerModel", (gemma4_text.Gemma4TextModel,), {"__call__": scope["__call__"]})


class NewerLayer(gemma4_text.DecoderLayer):  # type: ignore[misc]
    """A stub layer with one more keyword, that counts."""

    def __call__(self, x: mx.array, *arguments: Any, gain: float = 0.9, **named: Any) -> Any:
        hidden, *rest = super().__call__(x, *arguments, **named)
        return (hidden * gain, *rest)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("replaced", "reason"),
    [
        ("a layer", r"layers\.1 is test_versions\.NewerLayer; the file expects DecoderLayer"),
        ("the loop", r"model is test_versions\.NewerModel; the file expects Gemma4TextModel"),
    ],
)
def test_one_more_keyword_than_the_file_knows(replaced: str, reason: str, cached: bool) -> None:
    """B64: as the changed mlx-lm's own code, with taps too, and the reason; never an unexpected keyword."""
    base, other = toys.build(toys.E6), toys.build(toys.E6)
    for one in (base, other):
        for layer in one.layers[1:2] if replaced == "a layer" else one.layers:
            layer.__class__ = NewerLayer
        if replaced == "the loop":
            one.model.__class__ = newer_loop()
    model, plain = specialize(base, file_of(toys.E6)), Hooked(other)
    tap = HiddenTap(range(-1, 7))
    caches = (model.make_cache(), other.make_cache()) if cached else (None, None)
    for length in (9, 1):
        ids = toys.tokens(1, length)
        assert_same(model(ids, cache=caches[0], tap=tap), plain(ids, cache=caches[1]), "logits")
        assert_same(dict(sorted(tap.captured.items())), dict(sorted(plain.rows.items())), "taps")
    assert re.fullmatch(reason, model.dispatch.reason)
    assert model.dispatch.counts == {"generated": 0, "monolith": 2}
