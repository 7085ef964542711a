"""One process at a time writes to an `--out`. The lock goes with its process, however that ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StraightlineError


@contextmanager
def held(out: Path, command: str) -> Iterator[None]:
    """Holds `out` by a lock file beside it, removed at the end. Raises StraightlineError if another process holds it.

    Goes on without where files cannot be locked. Raises OSError if the folder cannot be written.
    """
    path = out.with_name(f"{out.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            if not _lock(file.fileno()):
                raise StraightlineError(
                    f"{out}: another straightline {command} is writing there; wait for it, or choose another --out"
                )
            if not _is_at(path, file.fileno()):
                continue  # its holder has just removed it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _lock(descriptor: int) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
