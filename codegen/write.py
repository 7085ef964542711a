"""Files to disk, all or none of them begun: each is the old file or the new one, whenever the process dies.

Writes only files whose bytes differ, each through `.NAME.*.tmp` beside it.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def write_files(folder: Path, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Write `files` (name in `folder` to bytes); the names of those that were not so already."""
    with _locked(folder) as descriptor:
        _remove_stale(folder, files)
        stale = [name for name, data in files.items() if not _holds(folder / name, data)]
        staged: dict[str, Path] = {}
        try:
            for name in stale:
                staged[name] = folder / f".{name}.{os.getpid()}.tmp"
                _stage(staged[name], files[name])
            for name, temporary in staged.items():
                os.replace(temporary, folder / name)
        finally:
            for temporary in staged.values():
                temporary.unlink(missing_ok=True)
        if stale:
            os.fsync(descriptor)
    return tuple(stale)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """One writer a folder; the system releases the lock of a process that dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_stale(folder: Path, names: Mapping[str, bytes]) -> None:
    """Temporary files here belong to dead runs: a live one would hold the lock."""
    for name in names:
        for path in folder.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)


def _holds(path: Path, data: bytes) -> bool:
    if path.exists() and not path.is_file() and not path.is_dir():
        return False  # a pipe: reading it would wait
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


def _stage(path: Path, data: bytes) -> None:
    # Not tempfile: it makes files that only their owner may read, whatever the umask.
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
