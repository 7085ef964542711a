"""Are arrays in the device's memory read rightly on the host, as `straightline taps` reads the rows that it writes?

python3 tests/gpu/host_reads.py      some seconds, anywhere

Each array goes to bytes the way `straightline taps` does it, and comes back as a new array that is compared on the
device. Beside it the same through a list. Exit code 1 if a byte differs.
"""

import sys

import mlx.core as mx
import numpy as np
from machine import describe

from straightline.runtime.arrays import UNSIGNED, bits, raw_bytes, same_bits

SHAPES = ((1, 1, 2560), (1, 300, 2560), (2, 2048, 3840), (1, 8192, 5376))


def through_bytes(rows: mx.array) -> mx.array:
    whole = np.frombuffer(raw_bytes(rows), np.dtype(f"u{rows.dtype.size}"))
    return mx.array(whole).view(rows.dtype).reshape(rows.shape)


def through_a_list(rows: mx.array) -> mx.array:
    return mx.array(bits(rows).tolist(), dtype=UNSIGNED[rows.dtype.size]).view(rows.dtype)


def main() -> int:
    print(*(f"{key}: {value}" for key, value in describe(None).items()), sep="\n", flush=True)
    wrong = 0
    for shape in SHAPES:
        for dtype in (mx.bfloat16, mx.float32):
            made = mx.random.normal(shape, key=mx.random.key(shape[1])).astype(dtype) * 3
            rows = {"whole": made, "one row": made[0, : max(1, shape[1] // 2)], "not evaluated": made + 1}
            for name, array in rows.items():
                found = same_bits(through_bytes(array), array)
                beside = same_bits(through_a_list(array), array) if array.size < 1 << 20 else "not tried"
                wrong += not found
                print(f"{shape} {dtype} {name}: bytes {found}, list {beside}", flush=True)
    print(f"{wrong} wrong" if wrong else "all bytes as on the device")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
