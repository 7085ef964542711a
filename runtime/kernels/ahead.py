"""Kernels compiled before MLX asks for them, kept from process to process, and laid where MLX looks for them.

Left alone, MLX compiles a custom kernel anew in every process, with a second of headers before each. Whatever cannot
be done here is left to it: the text is the same.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..atomic import write_bytes
from . import cubins, mlx_source, nvrtc
from .backends import Backend, header_of
from .memory import MLX
from .program import FOLDER, Program
from .site import Kernel


@dataclass(frozen=True)
class Laid:
    """files: what lies in MLX's folder for this kernel, or nothing. reason: then why MLX compiles it itself."""

    files: tuple[Path, ...] = ()
    reason: str = ""


class Ahead:
    """Lays a kernel when it is first called, since its text depends on the dtypes that it is called with."""

    def __init__(self, program: Program, backend: Backend) -> None:
        self.program = program
        self.backend = backend
        self.laid: Laid | None = None

    def of(self, kernel: Kernel) -> Kernel:
        """The kernel for a first call. Not for the hot path."""

        def call(*, inputs: Sequence[Any], output_dtypes: Sequence[mx.Dtype], **launch: Any) -> list[mx.array]:
            if self.laid is None:
                self.laid = lay(self.program, inputs, output_dtypes, self.backend)
            return kernel(inputs=inputs, output_dtypes=output_dtypes, **launch)

        return call

    def withdraw(self) -> bool:
        """From then on MLX compiles this one itself, if it has not loaded it yet. Whether anything was laid."""
        if self.laid is None or not self.laid.files:
            return False
        for path in self.laid.files:
            with suppress(OSError):
                path.unlink()
        self.laid = Laid(reason="it failed where it was compiled ahead")
        return True


def lay(program: Program, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype], backend: Backend) -> Laid:
    """Where MLX will find the kernel compiled, for such inputs. Never raises for anything that keeps it from that."""
    if not backend.architecture:
        return Laid()  # Metal keeps its own
    if MLX not in mlx_source.KNOWN:
        return Laid(reason=f"MLX {MLX} is not known to take a kernel that is compiled already")
    try:
        names, code = compiled(program, inputs, outputs, backend)
        name = backend.kernel_name(program)
        whole = mlx_source.text(program, name, header_of(program), inputs, outputs)
        return _put(mlx_source.module_name(name, whole), f"{names}\n".encode(), code)
    except OSError as error:
        return Laid(reason=f"{error.filename or mlx_source.folder(MLX)}: {error.strerror or error}")
    except Exception as error:  # whatever is wrong here, MLX can still compile
        return Laid(reason=f"it cannot be compiled ahead: {(str(error).strip() or repr(error)).splitlines()[0]}")


def compiled(
    program: Program, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype], backend: Backend
) -> tuple[str, bytes]:
    """A line of the names, and the machine code: from the cache folder, else compiled now. Raises CannotCompile."""
    name = backend.kernel_name(program)
    whole = mlx_source.text(program, name, f"\n{program.text}\n", inputs, outputs)
    architecture = f"--gpu-architecture={backend.architecture}"
    facts = (whole, _stand_in(), architecture, nvrtc.name(), MLX)
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
    found = cubins.kept(key)
    if found is None:
        kernel = mlx_source.kernel_name(name)
        options = [architecture, *(f"--include-path={path}" for path in mlx_source.include_folders())]
        lowered, code = nvrtc.compile_text(whole, kernel, dict.fromkeys(mlx_source.INCLUDED, _stand_in()), options)
        found = f"{kernel}\t{lowered}", code
        cubins.keep(key, *found)
    return found


def _put(module: str, names: bytes, code: bytes) -> Laid:
    """Both files, the one that MLX looks for last. What lies there already and is the same is left."""
    folder = mlx_source.folder(MLX)
    files = folder / f"{module}.txt", folder / f"{module}.ptx"
    for path, wanted in zip(files, (names, code), strict=True):
        if not path.is_file() or path.read_bytes() != wanted:
            write_bytes(path, wanted)
    return Laid(files)


@cache
def _stand_in() -> str:
    return (FOLDER / "stand_in.h").read_text()
