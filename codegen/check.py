"""Wanted bytes against a folder: which files are changed, missing or orphans. Reads the folder, writes nothing."""

import difflib
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import SpecError

DIFF_LINES = 100
NOT_RENDERED = ("__init__.py",)


@dataclass(frozen=True)
class File:
    """One file as it should be and as it is (None: not there)."""

    name: str
    wanted: bytes
    found: bytes | None

    @property
    def fresh(self) -> bool:
        return self.wanted == self.found

    def finding(self, path: str) -> Iterator[str]:
        if self.found is None:
            yield f"{path}: missing"
            return
        yield f"{path}: changed"
        old, new = (data.decode(errors="backslashreplace").splitlines() for data in (self.found, self.wanted))
        diff = list(difflib.unified_diff(old, new, f"{path} (on disk)", f"{path} (rendered)", lineterm=""))
        yield from diff[:DIFF_LINES]
        if len(diff) > DIFF_LINES:
            yield f"... and {len(diff) - DIFF_LINES} more lines of this diff"


def compare(folder: Path, wanted: Mapping[str, bytes]) -> tuple[File, ...]:
    return tuple(File(name, data, _found(folder / name)) for name, data in wanted.items())


def _found(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def orphans(folder: Path, rendered: Collection[str]) -> tuple[str, ...]:
    """Python files in `folder` that no spec makes."""
    if not folder.is_dir():
        raise SpecError(f"{folder.name}/ is not there; expected the committed folder (git checkout {folder.name})")
    return tuple(sorted(path.name for path in folder.glob("*.py") if path.name not in (*rendered, *NOT_RENDERED)))


def report(
    folder: str, files: Collection[File], strays: Collection[str], drift: Collection[str], cure: str
) -> Iterator[str]:
    """What a failed check says, line by line; nothing if all is well. `cure`: the command that renders stale files."""
    for file in files:
        if not file.fresh:
            yield from file.finding(f"{folder}/{file.name}")
    for name in strays:
        yield f"{folder}/{name}: orphan, made by no spec"
    yield from drift
    removal = [shlex.join(["rm", *(f"{folder}/{name}" for name in strays)])] if strays else []
    # Drift first: rendering is refused until it is reviewed, and accepting it renders every target.
    renewal = ["./regen.sh --accept-upstream"] if drift else [] if all(file.fresh for file in files) else [cure]
    if removal or renewal:
        yield f"To repair{' after that review' if drift else ''}: {' && '.join(removal + renewal)}"
