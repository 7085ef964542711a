"""Drift of mlx-lm is named, with the file to review; the committed lock is that of the installed mlx-lm."""

import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from straightline.codegen import SpecError, upstream

REPOSITORY = Path(__file__).parent.parent
ROUTER = '''\
import mlx


class Router:
    """Routes."""

    @property
    def scale(self):
        return 1

    @scale.setter
    def scale(self, value):
        pass

    # How.
    def __call__(self, x):
        return x


@mlx.compile
def geglu(gate, x):
    return gate * x
'''
LOCK = """\
mlx-lm 0.32.2

router.py -
    Router.__call__ - templates/experts.py.j2
    Router.scale - runtime/weights.py
    geglu - runtime/ops.py
"""


def install(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("mlx_lm", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(upstream, "find_spec", lambda name: spec)
    monkeypatch.setattr(upstream, "version", lambda name: "0.33.0")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small mlx_lm and its lock."""
    folder = tmp_path / "mlx_lm"
    folder.mkdir()
    (folder / "router.py").write_text(ROUTER)
    (tmp_path / "upstream.lock").write_text(LOCK)
    install(folder, monkeypatch)
    monkeypatch.setattr(upstream, "LOCK", tmp_path / "upstream.lock")
    upstream.LOCK.write_text(upstream.accepted())
    assert upstream.drift() == ()
    return folder


def edit(package: Path, old: str, new: str) -> None:
    text = (package / "router.py").read_text()
    assert old in text
    (package / "router.py").write_text(text.replace(old, new))


def test_a_changed_function_is_named(package: Path) -> None:
    edit(package, "return x\n", "return x + 0\n")
    assert upstream.drift() == (
        "mlx_lm/router.py: Router.__call__ changed in mlx-lm 0.33.0; "
        "review templates/experts.py.j2, then ./regen.sh --accept-upstream",
    )


def test_a_decorator_and_either_half_of_a_property_count(package: Path) -> None:
    edit(package, "@mlx.compile\n", "")
    edit(package, "pass", "self.value = value")
    assert [sentence.split(" in ")[0] for sentence in upstream.drift()] == [
        "mlx_lm/router.py: Router.scale changed",
        "mlx_lm/router.py: geglu changed",
    ]


def test_what_is_not_transcribed_may_change(package: Path) -> None:
    edit(package, "Routes.", "Routes tokens.")
    edit(package, "    # How.\n", "")
    (package / "router.py").write_text(f"import os\n{(package / 'router.py').read_text()}\n\nclass Other:\n    pass\n")
    assert upstream.drift() == ()


def test_a_removed_function_is_named_and_cannot_be_accepted(package: Path) -> None:
    edit(package, "def geglu", "def swiglu")
    assert upstream.drift() == (
        "mlx_lm/router.py: geglu is gone from mlx-lm 0.33.0; "
        "review runtime/ops.py, then ./regen.sh --accept-upstream",
    )
    with pytest.raises(SpecError) as caught:
        upstream.accepted()
    assert str(caught.value) == (
        "upstream.lock: geglu is gone from mlx-lm 0.33.0; expected its line removed by hand, after a review"
    )


def test_a_removed_file_loses_all_its_functions(package: Path) -> None:
    (package / "router.py").unlink()
    assert len(upstream.drift()) == 3
    with pytest.raises(SpecError, match=r"^upstream.lock: Router.__call__, Router.scale and geglu are gone from "):
        upstream.accepted()


def test_acceptance_is_a_fixpoint_and_says_its_version(package: Path) -> None:
    edit(package, "return x\n", "return x + 0\n")
    upstream.LOCK.write_text(upstream.accepted())
    assert upstream.drift() == ()
    assert upstream.accepted() == upstream.LOCK.read_text()
    assert "\nmlx-lm 0.33.0\n" in upstream.LOCK.read_text()


def test_a_line_added_by_hand_has_to_be_accepted(package: Path) -> None:
    upstream.LOCK.write_text(f"{upstream.LOCK.read_text()}    Router - runtime/weights.py\n")
    assert len(upstream.drift()) == 1
    upstream.LOCK.write_text(upstream.accepted())
    assert upstream.drift() == ()


def test_source_that_cannot_be_parsed_is_named(package: Path) -> None:
    (package / "router.py").write_text("def")
    with pytest.raises(SpecError) as caught:
        upstream.drift()
    assert str(caught.value) == "upstream: mlx_lm/router.py cannot be parsed by libcst; expected Python source"


def test_without_mlx_lm(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "find_spec", lambda name: None)
    with pytest.raises(SpecError) as caught:
        upstream.drift()
    assert str(caught.value) == ("upstream: mlx-lm is not installed; expected it beside straightline, to compare with")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no definition of mlx-lm, or a file without one; expected those to watch"),
        ("mlx-lm 0.32.2\n\nrouter.py -\n", "names no definition of mlx-lm, or a file without one; expected those to"),
        ("router.py -\n", 'line 1 is "router.py -"; expected mlx-lm and its version, a file and its digest, or a name'),
        (f"{LOCK}<<<<<<< HEAD\n", 'line 7 is "<<<<<<< HEAD"; expected mlx-lm and its version, a file and its digest, '),
        (f"{LOCK}    geglu 12 a\n", 'line 7 is "    geglu 12 a"; expected mlx-lm and its version, a file and its'),
    ],
)
def test_a_damaged_lock_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "upstream.lock"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        upstream.read_lock(path)
    assert str(caught.value).startswith(f"upstream.lock: {message}")


def test_the_committed_lock_is_that_of_the_installed_mlx_lm() -> None:
    assert upstream.drift() == ()
    assert upstream.accepted() == upstream.LOCK.read_text()


def test_every_committed_digest_holds_when_the_files_are_parsed(tmp_path: Path) -> None:
    """The whole-file digest saves a parse; here nothing is saved."""
    text = upstream.LOCK.read_text()
    for source in upstream.read_lock(upstream.LOCK).sources:
        text = text.replace(f"{source.path} {source.digest}", f"{source.path} -")
    path = tmp_path / "upstream.lock"
    path.write_text(text)
    locked = upstream.read_lock(path)
    assert upstream.differences(locked, upstream.installed(locked)) == ()


def test_what_to_review_is_there() -> None:
    for source in upstream.read_lock(upstream.LOCK).sources:
        for definition in source.definitions:
            assert (REPOSITORY / definition.review).is_file(), definition


def test_mlx_lm_is_never_imported() -> None:
    code = "import sys; from straightline.codegen import upstream; upstream.drift(); "
    code += "assert not {'mlx', 'mlx_lm', 'libcst'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_real_drift_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the installed mlx-lm with its router changed, as mlx-lm's main branch has."""
    found = find_spec("mlx_lm")
    assert found is not None and found.submodule_search_locations
    package = tmp_path / "mlx_lm"
    shutil.copytree(found.submodule_search_locations[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    copied = package / "models"
    source = (copied / "gemma4_text.py").read_text()
    (copied / "gemma4_text.py").write_text(source.replace("mx.softmax(top_k_weights", "mx.softmax(1 * top_k_weights"))
    install(package, monkeypatch)
    assert upstream.drift() == (
        "mlx_lm/models/gemma4_text.py: Router.__call__ changed in mlx-lm 0.33.0; "
        "review templates/experts.py.j2, then ./regen.sh --accept-upstream",
    )
