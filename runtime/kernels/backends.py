"""Which device is there, and how its kernels are made from a Program."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..atomic import write_text
from ..user_files import cache_folder
from . import nvrtc
from .program import Program

SWITCH = "STRAIGHTLINE_KERNELS"


@dataclass(frozen=True)
class Backend:
    """name: "cuda", "metal", or "" with the reason why there are no kernels. device: the name of the device.

    architecture, compiler: "sm_90" and "nvrtc 13.0", say, on CUDA.
    """

    name: str
    device: str = ""
    reason: str = ""
    architecture: str = ""
    compiler: str = ""

    def kernel_name(self, program: Program) -> str:
        """MLX keeps what is compiled for one architecture beside what is for another."""
        return f"{program.name}_{self.architecture}" if self.architecture else program.name

    def make(self, program: Program) -> Callable[..., list[mx.array]]:
        """MLX's custom kernel. It is compiled when it is first evaluated."""
        if self.name == "metal":
            return _kernel(mx.fast.metal_kernel, self.kernel_name(program), program, f"\n{program.text}\n")
        return _kernel(mx.fast.cuda_kernel, self.kernel_name(program), program, header_of(program))


def detect() -> Backend:
    """What the environment and the default device allow. Cheap; asked again at every `resolve`."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0"):
        return Backend("", reason=f"{SWITCH} is off")
    if mx.default_device().type != mx.DeviceType.gpu:
        return Backend("", reason="the default device is the CPU")
    for name in ("cuda", "metal"):
        module = getattr(mx, name, None)
        if module is not None and module.is_available():
            info = mx.device_info()
            device, architecture = str(info.get("device_name", "unknown")), str(info.get("architecture", ""))
            return Backend(name, device, "", architecture, nvrtc.name()) if name == "cuda" else Backend(name, device)
    return Backend("", reason=f"no kernels for the GPU of {sys.platform}")


def _kernel(factory: Callable[..., Any], name: str, program: Program, header: str) -> Callable[..., list[mx.array]]:
    kernel: Callable[..., list[mx.array]] = factory(
        name=name,
        input_names=list(program.inputs),
        output_names=list(program.outputs),
        source=program.source,
        header=header,
        ensure_row_contiguous=program.contiguous,
    )
    return kernel


def header_of(program: Program) -> str:
    """What goes before the kernel: the text in a file of its own, since the source is hashed at every call."""
    path = cache_folder().absolute() / "kernels" / f"{program.digest}.h"
    if '"' in str(path) or "\\" in str(path):
        return f"\n{program.text}\n"
    try:
        if not path.is_file() or path.read_text() != program.text:
            write_text(path, program.text)
    except OSError:
        return f"\n{program.text}\n"
    return f'#include "{path}"\n'
