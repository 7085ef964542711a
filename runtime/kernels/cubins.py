"""Compiled kernels in the user's cache folder. A file is its own digest, the name of the kernel in it, its code."""

import hashlib
from contextlib import suppress
from pathlib import Path

from ..atomic import write_bytes
from ..user_files import cache_folder


def keep(key: str, name: str, code: bytes) -> None:
    """A folder that cannot be written is no error: the next process compiles again."""
    held = name.encode() + b"\n" + code
    with suppress(OSError):
        write_bytes(_path(key), _digest(held) + b"\n" + held)


def kept(key: str) -> tuple[str, bytes] | None:
    """The name and the code; None if there are none, or if a byte of them has changed."""
    try:
        digest, _, held = _path(key).read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(held):
        return None
    name, _, code = held.partition(b"\n")
    return name.decode(), code


def _path(key: str) -> Path:
    return cache_folder() / "kernels" / f"{key}.cubin"


def _digest(held: bytes) -> bytes:
    return hashlib.sha256(held).hexdigest().encode()
