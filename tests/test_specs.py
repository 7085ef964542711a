"""codegen/specs/NAME.toml: what a spec states is checked against its config and its plan."""

import shutil
from pathlib import Path

import pytest

from straightline.codegen import target
from straightline.codegen.errors import SpecError
from straightline.codegen.plan import make_plan

NAME = "gemma4_e4b"


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in target.SPECS.glob(f"{NAME}*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(target, "SPECS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("stated", "instead", "message"),
    [
        ("layers = 42", "layers = 41", f"{NAME}.toml: layers is 41; expected 42, from {NAME}.config.json"),
        ("sentinel = 42", "sentinel = 41", f"{NAME}.toml: sentinel is 41; expected 42, from {NAME}.config.json"),
        (
            "taps = [-1, 42]",
            "taps = [0]",
            f"{NAME}.toml: taps is a list of 1; expected [-1, 42], from {NAME}.config.json",
        ),
        ("layers = 42\n", "", f"{NAME}.toml: layers is absent; expected each stated"),
        (
            'fused = ["scaled_add"]',
            'fused = ["x"]',
            f"{NAME}.toml: fused is a list of 1; expected a list out of scaled_add",
        ),
        (
            f'"{NAME}.config.json"',
            '"../x.json"',
            f'{NAME}.toml: config is "../x.json"; expected the name of a file beside it',
        ),
        ("sites = [", "sites = [1, ", f"{NAME}.toml: sites is a list of 12; expected a list of names"),
        (
            '"sliding_attention", ',
            "",
            f'codegen/specs/{NAME}.toml: sites[1] is "full_qkv"; expected "sliding_attention"',
        ),
        ('"layer_end",', "", f'codegen/specs/{NAME}.toml: sites[10] is nothing; expected "layer_end"'),
        (
            '"layer_end",',
            '"layer_end", "router"',
            f'codegen/specs/{NAME}.toml: sites[11] is "router"; expected nothing, of ["sliding_qkv", ',
        ),
        ("layers = 42", "layers == 42", f"{NAME}.toml: cannot be read ("),
        ("layers = 42", "layers = 42\nkinds = 3", f'{NAME}.toml: the top level has "kinds", unknown to straightline'),
    ],
)
def test_what_it_states_must_hold(specs: Path, stated: str, instead: str, message: str) -> None:
    path = specs / f"{NAME}.toml"
    text = path.read_text()
    assert text.count(stated) == 1
    path.write_text(text.replace(stated, instead))
    with pytest.raises(SpecError) as error:
        make_plan(target.read_target("gemma4-e4b"))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_every_committed_spec_states_its_sites() -> None:
    for name in target.target_names():
        found = target.read_target(name)
        assert found.sites == tuple(site.name for site in make_plan(found).sites)
