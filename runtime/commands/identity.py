"""Which weights these are: enough of a checkpoint's files to tell it from another of the same shapes, in no time."""

import hashlib
from pathlib import Path

from ...codegen.checkpoint import SHARDS

PIECE = 1 << 20


def weights_digest(folder: Path) -> str:
    """16 hex digits of the name, the size, the first and the last MiB of each safetensors file."""
    hashed = hashlib.sha256()
    for path in sorted(folder.glob(SHARDS)):
        length = path.stat().st_size
        hashed.update(f"{path.name} {length}\n".encode())
        with path.open("rb") as file:
            hashed.update(file.read(PIECE))
            file.seek(max(0, length - PIECE))
            hashed.update(file.read(PIECE))
    return hashed.hexdigest()[:16]
