"""A kernel as text: which of the .h files here, with which sizes, called how. Rendering is a pure function."""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parent
# Metal hands these over only to a source that names them.
PLACES = {
    "cuda": "HERE",
    "metal": "straightline::Place{int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y), "
    "int(thread_position_in_threadgroup.x)}",
}


class Unsupported(Exception):
    """A site that has no kernel here; the message says why."""


@dataclass(frozen=True)
class Program:
    """One kernel of one site. `arguments` name inputs and outputs in the order of the device function `function`.

    The grid is `blocks` by `lines * rows` blocks of `threads` threads, for `rows` rows of the batch.
    """

    backend: str
    function: str
    headers: tuple[str, ...]
    constants: tuple[tuple[str, int | float], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: tuple[str, ...]
    threads: int
    blocks: int = 1
    lines: int = 1
    shared: tuple[tuple[str, str, int], ...] = ()
    contiguous: bool = True  # MLX copies inputs that are not

    @cached_property
    def text(self) -> str:
        """All that the kernel's body needs, as one file."""
        constants = "".join(f"CONSTANT {_type(value)} {name} = {_literal(value)};\n" for name, value in self.constants)
        backend, *others = [(FOLDER / name).read_text() for name in (f"{self.backend}.h", *self.headers)]
        return "\n".join([backend, f"namespace straightline {{\n{constants}}}\n", *others])

    @property
    def source(self) -> str:
        """The body of the kernel: short, because MLX hashes it at every call."""
        shared = "".join(f"SHARED({kind}, {name}, {count}) " for kind, name, count in self.shared)
        arguments = ", ".join((*self.arguments, *(name for _, name, _ in self.shared), PLACES[self.backend]))
        return f"{shared}straightline::{self.function}({arguments});"

    @cached_property
    def digest(self) -> str:
        """Changes with anything that the kernel computes or how it is launched."""
        launch = f"{self.inputs} {self.outputs} {self.threads} {self.blocks} {self.lines}"
        return hashlib.sha256("\0".join((self.text, self.source, launch)).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        return f"{self.function}_{self.digest[:8]}"


def float32(value: float) -> float:
    """The value rounded to float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _type(value: int | float) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def _literal(value: int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{float32(value)!r}f" if isinstance(value, float) else str(value)
