"""Files written in one step, so that nobody ever sees half a file, whatever is killed."""

import os
import threading
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """The whole text or nothing, for whoever reads the file meanwhile. Raises OSError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """The same for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with written.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except OSError as error:
        # A full disk does not say which; a folder of that name would be said of the file beside it.
        error.filename = str(path)
        raise
    finally:
        written.unlink(missing_ok=True)
