"""The supported range of MLX and mlx-lm: stated once more in code than in pyproject.toml, and checked (B64)."""

import re
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
