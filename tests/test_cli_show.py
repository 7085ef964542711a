"""`straightline show`: the picture in the terminal line by line, and an SVG that is well formed whatever it holds."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from straightline.codegen.target import read_target
from straightline.runtime.cli import main
from straightline.runtime.commands.drawing import drawing
from straightline.runtime.commands.picture import headline, rows
from straightline.runtime.commands.terminal import terminal

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def test_the_terminal_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gemma4-e4b-optiq", "--taps", "5,42"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "gemma4-e4b-optiq",
        "42 layers (35 sliding with a window of 512, 7 full), 18 share K/V, hidden 2560, vocabulary 262144, "
        "per-layer inputs of 256",
        "",
        "tap       attention   heads      MLP    input  K/V",
        " -1       embedding",
        "  0    ▪  sliding     8:2 x 256  10240  +256   ·· 4-bit",
    ]
    assert lines[10] == "  5 *  █  FULL        8:2 x 512  10240  +256   ·· 4-bit"
    assert lines[27:30] == [
        " 22    ▪  sliding     8:2 x 256  10240  +256   ┐· 4-bit, read by 15",
        " 23    █  FULL        8:2 x 512  10240  +256   │┐ 4-bit, read by 3",
        " 24    ▪  sliding     8:2 x 256  10240  +256   ┤│ reads 22",
    ]
    assert lines[45:] == [
        " 40    ▪  sliding     8:2 x 256  10240  +256   ┘│ reads 22",
        " 41    █  FULL        8:2 x 512  10240  +256   ·┘ reads 23",
        " 42 *     final norm",
    ]


def test_experts_and_shared_projections() -> None:
    spec = read_target("gemma4-26b").spec
    lines = terminal("26b", headline(spec), rows(spec), frozenset(), spec.sentinel).splitlines()
    assert lines[1].endswith("128 experts, 8 a token")
    assert lines[10] == "  5  █  FULL        16:2 x 512  2112  128 x 704, top 8  plain K=V"


@pytest.mark.parametrize("name", ["gemma4-e4b", "gemma4-26b"])
def test_the_pictures_of_the_readme_are_fresh(name: str, tmp_path: Path) -> None:
    assert main(["show", name, "--svg", str(tmp_path / "new.svg")]) == 0
    assert (IMAGES / f"{name}.svg").read_text() == (tmp_path / "new.svg").read_text()


@pytest.mark.parametrize("name", ["gemma4-12b-optiq", "gemma4-e2b", "gemma4-31b"])
def test_every_shape_is_well_formed(name: str) -> None:
    spec = read_target(name).spec
    root = ElementTree.fromstring(drawing(name, headline(spec), rows(spec), frozenset({1}), spec.sentinel))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    count = sum(word in ("sliding", "full") for word in words)
    assert count == len(spec.layers)
    height = float(root.attrib["height"])
    assert all(float(element.attrib["y"]) < height for element in root.iter("{http://www.w3.org/2000/svg}text"))


def test_names_are_escaped() -> None:
    spec = read_target("gemma4-e4b").spec
    name = "<script>&\"'"
    root = ElementTree.fromstring(drawing(name, headline(spec), rows(spec), frozenset(), spec.sentinel))
    assert name in [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_json_and_a_kv_config_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.json"
    path.write_text('[{"layer_idx": 5, "bits": 8, "group_size": 64}]')
    assert main(["show", "gemma4-26b", "--json", "--kv-config", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["index"] for row in found["layers"] if row["kv_bits"]] == [5]
    path.write_text('[{"layer_idx": 5, "bits": 5, "group_size": 64}]')
    assert main(["show", "gemma4-26b", "--kv-config", str(path)]) == 1
    assert capsys.readouterr().err == "error: kv_config.json: [0].bits is 5; expected 0, 2, 3, 4, 6 or 8\n"


def test_unknown_taps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gemma4-e4b", "--taps", "43"]) == 1
    assert capsys.readouterr().err == "error: --taps has 43; expected -1 to 42\n"


@pytest.mark.parametrize("wrong", ["a", "1,1", "", "1,", "1.5"])
def test_indices_that_are_none(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["show", "gemma4-e4b", "--taps", wrong])
    assert stopped.value.code == 2
    said = f"error: argument --taps: {wrong!r}; expected whole numbers, each once, such as 5,17,48"
    assert capsys.readouterr().err == f"{said} (see straightline show --help)\n"


def test_a_folder_in_the_place_of_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names what was asked for, and nothing is left beside it."""
    (tmp_path / "there").mkdir()
    assert main(["show", "gemma4-e4b", "--svg", str(tmp_path / "there")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'there'}: is a folder; expected a file to write\n"
    assert [one.name for one in tmp_path.iterdir()] == ["there"]
