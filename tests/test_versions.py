"""The supported range of MLX and mlx-lm: stated once more in code than in pyproject.toml, and checked (B64)."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from straightline.runtime import versions

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
