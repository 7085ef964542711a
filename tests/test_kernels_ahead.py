"""Kernels compiled ahead: MLX's text and file names, what is kept, what is laid, and that MLX does what cannot be done.

Whether MLX finds what is laid is seen on a GPU alone: tests/gpu/load_time.py.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from straightline.runtime.kernels import (
    FastAttention,
    Geglu,
    PerLayerGate,
    QKVRope,
    QuantizedMatvec,
    ResidualNorms,
    ahead,
    cubins,
    fast_resolve,
    mlx_source,
    nvrtc,
    report,
    resolve,
)
from straightline.runtime.kernels.ahead import Ahead, Laid, lay
from straightline.runtime.kernels.backends import Backend, header_of
from straightline.runtime.kernels.fast_check import Errors
from straightline.runtime.kernels.launch import launcher
from straightline.runtime.kernels.murmur import string_hash
from straightline.runtime.kernels.program import Program

resolving = sys.modules[resolve.__module__]
SITE = ResidualNorms(64, 1e-06, scaled=True, norms=1)
DEVICE = Backend("cuda", "Fake 9000", "", "sm_90", "nvrtc 13.0")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "ptx"))
    monkeypatch.delenv("STRAIGHTLINE_KERNELS", raising=False)
    monkeypatch.setattr(ahead, "MLX", mlx_source.KNOWN[0])
    monkeypatch.setattr(nvrtc, "name", lambda: "nvrtc 13.0")
    resolving.forget()
    yield
    resolving.forget()


@dataclass
class Compiler:
    """In the place of NVRTC: "machine code" that tells what it was made from."""

    runs: int = 0
    fails: str = ""

    def __call__(self, text: str, kernel: str, headers: Any, options: Any) -> tuple[str, bytes]:
        self.runs += 1
        if self.fails:
            raise nvrtc.CannotCompile(self.fails)
        return f"_Z{kernel}", b"\x7fELF\n\x00" + str(string_hash(text.encode())).encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    one = Compiler()
    monkeypatch.setattr(nvrtc, "compile_text", one)
    return one


def zeros(*dtypes: mx.Dtype) -> list[mx.array]:
    return [mx.zeros((1, 1, 4), dtype) for dtype in dtypes]


def laid(site: Any = SITE, backend: Backend = DEVICE, dtype: mx.Dtype = mx.bfloat16) -> Laid:
    return lay(site.program("cuda"), zeros(*[dtype] * 5), (dtype, dtype), backend)


def put(folder: str) -> dict[str, bytes]:
    path = Path(os.environ[folder])
    return {one.name: one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()} if path.is_dir() else {}


# What MLX makes of a kernel


def test_the_hash_is_that_of_libstdcxx() -> None:
    """The numbers are what a C++ program compiled with g++ 12 prints for std::hash<std::string>."""
    alphabet = bytes(ord("a") + index % 26 for index in range(5000))
    assert string_hash(b"") == 0x553E93901E462A6E
    assert string_hash(b"hello") == 0x26553298FDBE39C8
    assert string_hash(alphabet) == 0x9D83351E000C8337
    assert string_hash(bytes(200 + 37 * index & 255 for index in range(8))) == 0x95D0768F99170940
    assert string_hash(bytes(200 + 37 * index & 255 for index in range(39))) == 0xFD489C19D2055CBA


def small(*arguments: str) -> Program:
    return Program("cuda", "f", (), (), inputs=("x", "at"), outputs=("y", "z"), arguments=arguments, threads=32)


def test_the_whole_text() -> None:
    inputs = zeros(mx.bfloat16, mx.int32)
    found = mlx_source.text(small("x", "y"), "f_1", '#include "/a.h"\n', inputs, (mx.bfloat16, mx.float32))
    assert found == """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#include "/a.h"
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_f_1(
    const __nv_bfloat16* x,
    const int32_t* at,
    __nv_bfloat16* y,
    float* z) {
straightline::f(x, y, HERE);
}

} // namespace mlx::core::cu
"""


def test_what_a_source_names_of_its_inputs_is_handed_over() -> None:
    inputs, outputs = [zeros(mx.float32)[0], mx.array(7, dtype=mx.uint32)], (mx.float32, mx.float32)
    found = mlx_source.text(small("x_shape[2]", "x_strides", "at_ndim", "x_ndim"), "f_1", "", inputs, outputs)
    assert """(
    const float* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ Strides x_strides,
    const __grid_constant__ int x_ndim,
    const uint32_t* at,
    float* y,""" in found


def test_the_file_is_named_after_the_whole_text() -> None:
    assert mlx_source.module_name("f_1", "hello") == "custom_kernel_f_1_26553298fdbe39c8"


def test_where_mlx_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mlx_source.folder("1.2") == Path(os.environ["MLX_PTX_CACHE_DIR"])
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    for name in mlx_source.TEMPORARY:
        monkeypatch.delenv(name, raising=False)
    assert mlx_source.folder("1.2") == Path("/tmp/mlx/1.2/ptx")
    monkeypatch.setenv("TEMP", "/b")
    assert mlx_source.folder("1.2") == Path("/b/mlx/1.2/ptx")
    monkeypatch.setenv("TMPDIR", "/a")
    assert mlx_source.folder("1.2") == Path("/a/mlx/1.2/ptx")


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        (SITE, (mx.bfloat16,) * 5),
        (QKVRope(4, 2, 64, 1e-06), (mx.bfloat16,) * 3 + (mx.int32, mx.float32)),
        (PerLayerGate(64, 5), (mx.bfloat16, mx.bfloat16, mx.int32)),
        (Geglu(64), (mx.bfloat16,)),
        (QuantizedMatvec(256, 96), (mx.bfloat16, mx.uint32, mx.bfloat16, mx.bfloat16)),
    ],
    ids=repr,
)
def test_a_kernel_is_laid_at_its_first_call(
    site: Any, expected: tuple[mx.Dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def laying(program: Program, inputs: Any, outputs: Any, backend: Backend) -> Laid:
        asked.append((program, tuple(one.dtype for one in inputs), set(outputs)))
        return Laid(reason="no")

    def kernel(*, output_shapes: Any, output_dtypes: Any, **launch: Any) -> list[mx.array]:
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    monkeypatch.setattr(ahead, "lay", laying)
    program = site.program("cuda")
    first = Ahead(program, DEVICE)
    call = launcher(site, program, first.of(kernel), mx.bfloat16, several=False)
    for seed in range(2):
        call(*site.inputs(seed))
    assert asked == [(program, expected, {mx.bfloat16})]
    assert first.laid == Laid(reason="no")


# What is kept and laid


def test_a_kernel_is_compiled_once_and_laid_where_mlx_looks(compiler: Compiler) -> None:
    first = laid()
    program = SITE.program("cuda")
    name = f"{program.name}_sm_90"
    whole = mlx_source.text(program, name, header_of(program), zeros(*[mx.bfloat16] * 5), (mx.bfloat16,) * 2)
    module = f"custom_kernel_{name}_{string_hash(whole.encode()):x}"
    kernel = f"mlx::core::cu::custom_kernel_{name}"
    assert [path.name for path in first.files] == [f"{module}.txt", f"{module}.ptx"]
    held = put("MLX_PTX_CACHE_DIR")
    assert held[f"{module}.txt"] == f"{kernel}\t_Z{kernel}\n".encode()
    assert held[f"{module}.ptx"].startswith(b"\x7fELF\n\x00")
    assert (laid(), compiler.runs, first.reason) == (first, 1, "")
    for path in first.files:
        path.unlink()  # a reboot empties /tmp
    assert (laid(), put("MLX_PTX_CACHE_DIR"), compiler.runs) == (first, held, 1)


def test_whatever_may_change_the_machine_code_compiles_anew(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid()
    laid(backend=Backend("cuda", "Fake 9000", "", "sm_80", "nvrtc 13.0"))
    assert compiler.runs == 2
    laid(ResidualNorms(64, 1e-05, scaled=True, norms=1))
    assert compiler.runs == 3
    monkeypatch.setattr(nvrtc, "name", lambda: "nvrtc 13.1")
    laid()
    assert compiler.runs == 4
    monkeypatch.setattr(ahead, "_stand_in", lambda: "// another")
    laid()
    assert compiler.runs == 5
    assert len([name for name in put("MLX_PTX_CACHE_DIR") if name.endswith(".ptx")]) == 3  # one a name, as MLX has it


@pytest.mark.parametrize("damage", [b"", b"\n", b"x", b"0" * 64 + b"\nname\ncode"])
def test_a_damaged_file_is_compiled_anew(damage: bytes, compiler: Compiler) -> None:
    laid()
    (kept,) = Path(os.environ["STRAIGHTLINE_CACHE"], "kernels").glob("*.cubin")
    whole = kept.read_bytes()
    for spoiled in (damage, whole[:-1], whole[:-1] + b"?", b"?" + whole[1:]):
        kept.write_bytes(spoiled)
        assert cubins.kept(kept.stem) is None
    laid()
    assert (kept.read_bytes(), compiler.runs) == (whole, 2)


def test_what_lies_there_damaged_is_laid_again(compiler: Compiler) -> None:
    one = laid()
    held = put("MLX_PTX_CACHE_DIR")
    for path in one.files:
        path.write_bytes(path.read_bytes()[:3])
    laid()
    assert (put("MLX_PTX_CACHE_DIR"), compiler.runs) == (held, 1)


def test_two_processes_at_once_lay_whole_files(compiler: Compiler) -> None:
    code = (
        "import sys; from pathlib import Path; from straightline.runtime.kernels import ahead\n"
        "for i in range(50): ahead._put('module', b'name\\n', b'code' * 5000)\n"
        "assert Path(sys.argv[1], 'module.ptx').read_bytes() == b'code' * 5000"
    )
    folder = os.environ["MLX_PTX_CACHE_DIR"]
    running = [subprocess.Popen([sys.executable, "-c", code, folder]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert sorted(put("MLX_PTX_CACHE_DIR")) == ["module.ptx", "module.txt"]


# What cannot be done is left to MLX


def test_a_folder_of_mlx_that_cannot_be_written(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "ptx").write_text("")
    assert laid() == Laid(reason=f"{tmp_path / 'ptx'}: File exists")


def test_a_cache_folder_that_cannot_be_written(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert laid().files and laid().files and compiler.runs == 2


def test_an_unknown_mlx(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MLX", "0.99.0")
    assert laid() == Laid(reason="MLX 0.99.0 is not known to take a kernel that is compiled already")
    assert (compiler.runs, put("MLX_PTX_CACHE_DIR")) == (0, {})


def test_no_architecture_nothing_to_lay(compiler: Compiler) -> None:
    assert laid(backend=Backend("metal", "M")) == Laid()
    assert (compiler.runs, put("MLX_PTX_CACHE_DIR")) == (0, {})


def test_a_text_that_cannot_be_compiled(compiler: Compiler) -> None:
    compiler.fails = "\nkernel.cu(3): error: y is undefined\n\n1 error"
    assert laid() == Laid(reason="it cannot be compiled ahead: kernel.cu(3): error: y is undefined")
    assert put("MLX_PTX_CACHE_DIR") == {}


def test_an_unexpected_dtype(compiler: Compiler) -> None:
    assert laid(dtype=mx.float16) == Laid(reason="it cannot be compiled ahead: mlx.core.float16")


@dataclass(frozen=True)
class Device(Backend):
    """Runs the plain form; fails while `fails()`."""

    fails: Callable[[], bool] = lambda: False

    def make(self, program: Program) -> Callable[..., list[mx.array]]:
        def kernel(*, inputs: tuple[Any, ...], **launch: Any) -> list[mx.array]:
            if self.fails():
                raise RuntimeError("Failed to load compiled kernel: invalid image.")
            return self.run(inputs)

        return kernel

    def run(self, inputs: tuple[Any, ...]) -> list[mx.array]:
        outputs: Any = SITE.plain(*inputs)
        return list(outputs)


def use(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool]) -> None:
    device = Device("cuda", "Fake 9000", "", "sm_90", "nvrtc 13.0", fails)
    monkeypatch.setattr(resolving, "detect", lambda: device)


def test_a_kernel_that_fails_as_laid_is_left_to_mlx(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda: bool(put("MLX_PTX_CACHE_DIR")))
    assert resolve(SITE) != SITE.plain
    state, reason = report()[SITE]
    assert state == "kernel"
    assert reason.startswith("exact: ")
    assert reason.endswith("; compiled anew in every process: it failed where it was compiled ahead")
    assert put("MLX_PTX_CACHE_DIR") == {}


def test_the_fast_tier_too_leaves_to_mlx_what_fails_as_laid(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = FastAttention(4, 2, 256)
    device = Device("cuda", "Fake 9000", "", "sm_90", "nvrtc 13.0", lambda: bool(put("MLX_PTX_CACHE_DIR")))

    def exact(site: FastAttention, call: Callable[..., Any]) -> list[Errors]:
        call(*site.inputs_of(5, 0))
        return [Errors(5, 0.0, 0.0)]

    monkeypatch.setattr(Device, "run", lambda _, inputs: [mx.zeros((1,))])
    monkeypatch.setattr(fast_resolve, "detect", lambda: device)
    monkeypatch.setattr(fast_resolve, "errors", exact)
    fast_resolve.forget()
    found = fast_resolve.resolve_fast(site)
    fast_resolve.forget()
    assert found.call is not None
    assert found.reason.startswith("error at most ")
    assert found.reason.endswith("; compiled anew in every process: it failed where it was compiled ahead")
    assert put("MLX_PTX_CACHE_DIR") == {}


def test_a_kernel_that_fails_either_way_is_off(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda: True)
    assert resolve(SITE) == SITE.plain
    assert report()[SITE] == ("plain", "failed: Failed to load compiled kernel: invalid image.")


def test_the_report_says_why_a_kernel_is_compiled_anew(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda: False)
    resolve(SITE)
    assert "anew" not in report()[SITE][1]
    resolving.forget()
    monkeypatch.setattr(ahead, "MLX", "0.99.0")
    resolve(SITE)
    assert report()[SITE][1].endswith(
        "; compiled anew in every process: MLX 0.99.0 is not known to take a kernel that is compiled already"
    )


# NVRTC


class Library:
    """The functions of NVRTC that are called, over pointers of ctypes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.called: list[str] = []
        self.given: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvrtc"):
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.called.append(name.removeprefix("nvrtc"))
            return int(getattr(self, f"_{name.removeprefix('nvrtc')}", lambda *_: 0)(*arguments) or 0)

        return function

    def _Version(self, major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = 13, 2

    def _CreateProgram(self, program: Any, text: bytes, name: bytes, count: int, texts: Any, names: Any) -> None:
        self.given = {"text": text, "headers": dict(zip(names, texts, strict=True)), "count": count}

    def _CompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.given["options"] = list(options)[:count]
        return self.code

    def _GetLoweredName(self, program: Any, kernel: bytes, lowered: Any) -> None:
        lowered._obj.value = b"_Z" + kernel

    def _GetProgramLogSize(self, program: Any, size: Any) -> None:
        size._obj.value = 20

    def _GetProgramLog(self, program: Any, buffer: Any) -> None:
        buffer.value = b"error: y"

    def _GetCUBINSize(self, program: Any, size: Any) -> None:
        size._obj.value = 6

    def _GetCUBIN(self, program: Any, buffer: Any) -> None:
        buffer.raw = b"\x7fEL\x00F\x00"

    @property
    def nvrtcGetErrorString(self) -> Any:
        class Named:
            restype = ctypes.c_char_p

            def __call__(self, code: int) -> bytes:
                return f"code {code}".encode()

        return Named()


def test_what_nvrtc_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    library = Library()
    monkeypatch.setattr(nvrtc, "_library", lambda: library)
    assert nvrtc.name() == "nvrtc 13.2"
    assert nvrtc.compile_text("text", "a::b", {"h.h": "one", "g.h": "two"}, ["-x", "-y"]) == (
        "_Za::b",
        b"\x7fEL\x00F\x00",
    )
    assert library.given == {
        "text": b"text",
        "headers": {b"h.h": b"one", b"g.h": b"two"},
        "count": 2,
        "options": [b"-x", b"-y"],
    }
    assert library.called[-1] == "DestroyProgram"


def test_what_nvrtc_answers_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    library = Library(code=6)
    monkeypatch.setattr(nvrtc, "_library", lambda: library)
    with pytest.raises(nvrtc.CannotCompile, match=r"^error: y$"):
        nvrtc.compile_text("text", "a", {}, [])
    assert library.called[-1] == "DestroyProgram"


@pytest.mark.skipif(sys.platform != "linux", reason="asks for a library of Linux")
def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc, "NAMES", ("libnvrtc.so.0",))
    nvrtc._library.cache_clear()
    assert nvrtc.name() == ""
    with pytest.raises(nvrtc.CannotCompile, match="MLX has loaded no NVRTC that is known here"):
        nvrtc.compile_text("text", "a", {}, [])


def test_headers_beside_mlx_come_before_those_of_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_source.mx, "__file__", str(tmp_path / "mlx" / "core.so"))
    monkeypatch.setenv("CUDA_HOME", "/toolkit")
    cccl = tmp_path / "mlx" / "include" / "cccl"
    assert mlx_source.include_folders() == [cccl, Path("/toolkit/include"), Path("/toolkit/include/cccl")]
    headers = tmp_path / "nvidia" / "cu13" / "include"
    headers.mkdir(parents=True)
    assert mlx_source.include_folders() == [cccl, headers, headers / "cccl"]
