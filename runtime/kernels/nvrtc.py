"""NVIDIA's runtime compiler, the copy that MLX has loaded: a CUDA text to the machine code of one architecture."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cache

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class CannotCompile(Exception):
    """The message is what the compiler says, or why there is none."""


def name() -> str:
    """ "nvrtc 13.0", or "" where MLX has loaded none that can be used. Never raises."""
    try:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    except (CannotCompile, AttributeError):
        return ""
    return f"nvrtc {major.value}.{minor.value}"


def compile_text(text: str, kernel: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[str, bytes]:
    """The name of the kernel `kernel` (in C++) within the machine code, and the machine code.

    headers: by the name under which they are included. Raises CannotCompile.
    """
    program = ctypes.c_void_p()
    names, texts = _strings(headers), _strings(headers.values())
    _call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", len(headers), texts, names)
    try:
        _call("nvrtcAddNameExpression", program, kernel.encode())
        try:
            _call("nvrtcCompileProgram", program, len(options), _strings(options))
        except CannotCompile as error:
            raise CannotCompile(_read(program, "ProgramLog").decode(errors="replace") or str(error)) from None
        lowered = ctypes.c_char_p()
        _call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(lowered))
        return (lowered.value or b"").decode(), _read(program, "CUBIN")
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


@cache
def _library() -> ctypes.CDLL:
    for one in NAMES:
        try:
            return ctypes.CDLL(one, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except (OSError, AttributeError):  # another system has no RTLD_NOLOAD
            continue
    raise CannotCompile("MLX has loaded no NVRTC that is known here")


def _call(function: str, *arguments: object) -> None:
    library = _library()
    code = getattr(library, function)(*arguments)
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CannotCompile(f"{function}: {library.nvrtcGetErrorString(code).decode()}")


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", program, buffer)
    return buffer.raw if what == "CUBIN" else buffer.value


def _strings(texts: object) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]  # type: ignore[attr-defined]
    return (ctypes.c_char_p * len(encoded))(*encoded)
