"""What `mx.fast.cuda_kernel` makes of a kernel: the whole text, and where it looks for it compiled before it compiles.

These are internals of MLX, read in the versions of KNOWN. If one is other than thought, MLX does not find what is laid
there and compiles the text itself, as ever: it finds by a hash of the text that it has made.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from .murmur import string_hash
from .program import Program

KNOWN = ("0.32.4",)
INCLUDED = (
    "mlx/backend/cuda/device/utils.cuh",
    "mlx/backend/cuda/device/binary_ops.cuh",
    "mlx/backend/cuda/device/unary_ops.cuh",
    "cooperative_groups.h",
)
TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float32: "float", mx.int32: "int32_t", mx.uint32: "uint32_t"}
SHAPES = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")


def kernel_name(name: str) -> str:
    """The kernel in C++, of a custom kernel called `name`."""
    return f"mlx::core::cu::custom_kernel_{name}"


def text(program: Program, name: str, header: str, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]) -> str:
    """The whole text, for such inputs. Raises KeyError for a dtype that no kernel here takes."""
    parameters = [one for pair in zip(program.inputs, inputs, strict=True) for one in _parameters(program, *pair)]
    parameters += [f"{TYPES[dtype]}* {one}" for one, dtype in zip(program.outputs, outputs, strict=True)]
    return (
        f'\n#include "{INCLUDED[0]}"\n\n#include <{INCLUDED[-1]}>\n\n{header}'
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void custom_kernel_{name}(\n    " + ",\n    ".join(parameters) + ") {\n"
        f"{program.source}\n}}\n\n}} // namespace mlx::core::cu\n"
    )


def _parameters(program: Program, name: str, array: mx.array) -> Iterator[str]:
    """Of one input: where it lies, and what the source names of its shape."""
    yield f"const {TYPES[array.dtype]}* {name}"
    for what, kind in SHAPES.items():
        if array.ndim and f"{name}_{what}" in program.source:
            yield f"const __grid_constant__ {kind} {name}_{what}"


def module_name(name: str, whole: str) -> str:
    """What the files in `folder()` are called, without `.ptx` (the machine code) and `.txt` (the names in it)."""
    return f"custom_kernel_{name}_{string_hash(whole.encode()):x}"


def folder(version: str) -> Path:
    """Where MLX keeps what it has compiled. It asks once a process, at its first kernel."""
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    if chosen is not None:
        return Path(chosen)
    return Path(next((os.environ[one] for one in TEMPORARY if one in os.environ), "/tmp")) / "mlx" / version / "ptx"


def include_folders() -> list[Path]:
    """NVIDIA's headers: those that come with MLX, then those beside its library or in the CUDA toolkit."""
    packages = Path(mx.__file__).parents[1]
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    wheels = (packages / "nvidia" / name / "include" for name in ("cu13", "cuda_runtime"))
    headers = next((path for path in wheels if path.is_dir()), Path(toolkit) / "include")
    return [packages / "mlx" / "include" / "cccl", headers, headers / "cccl"]
