"""Arrays as the bits that they are, so that a NaN equals itself and -0.0 differs from 0.0; and the name of a dtype."""

from typing import Any

import mlx.core as mx

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def bits(array: mx.array) -> mx.array:
    """Unsigned integers of the same size, over the same memory."""
    return array.view(UNSIGNED[array.dtype.size])


def same_bits(found: mx.array, expected: mx.array) -> bool:
    """Shape and dtype, too."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool(mx.array_equal(bits(found), bits(expected)).item())


def difference(found: mx.array, expected: mx.array) -> str:
    """How many values differ and the first of them, such as "at flat index 7 (2 of 640 values; 1.5, not 1.25)".

    "" if these are the same bits.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"of {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    one, other = (mx.contiguous(array).flatten() for array in (found, expected))
    differs = bits(one) != bits(other)
    count, first = (number.item() for number in (mx.sum(differs), mx.argmax(differs)))
    return f"at flat index {first} ({count} of {one.size} values; {one[first]}, not {other[first]})" if count else ""


def copied(array: mx.array) -> mx.array:
    """An array that shares no memory with anything, once it is evaluated."""
    copy: mx.array = (bits(array) | 0).view(array.dtype)
    return copy


def raw_bytes(array: mx.array) -> bytes:
    """In row-major order. Contiguous before it leaves MLX, so that no strides are left to the reader."""
    whole: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)  # it has the buffer protocol, its stubs do not say so
    return bytes(memoryview(whole))


def dtype_name(dtype: mx.Dtype) -> str:
    """ "bfloat16", without the module that it is of."""
    return str(dtype).rpartition(".")[2]
