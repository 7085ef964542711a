"""The calls of FastAttention from its compiled kernels: few rows in one launch, many in two."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .fast import CLUSTER, MOST_PARTS, FastAttention
from .program import Program
from .site import Call, Kernel

FLOATS = (mx.float32, mx.float32)
LEAST_PARTS = 16
ROWS_OF_A_PART = 128


def clustered(site: FastAttention, program: Program, kernel: Kernel) -> Call:
    """(q, k, v[, rows]) in one launch."""
    shapes, dtypes, unit, plain = site.shapes(1), (mx.bfloat16,), site.unit, site.plain
    threads, grid = (program.threads, 1, 1), (program.threads * CLUSTER, program.lines, 1)

    def call(q: mx.array, k: Any, v: Any, *rows: mx.array) -> Any:
        if q.size != unit:
            return plain(q, k, v, *rows)
        inputs = (q, k, v, *rows)
        return kernel(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes, grid=grid, threadgroup=threads)[0]

    def packed(q: mx.array, k: Any, v: Any, *rows: mx.array) -> Any:
        if q.size != unit:
            return plain(q, k, v, *rows)
        inputs = (q, *k, *v, *rows)
        return kernel(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes, grid=grid, threadgroup=threads)[0]

    return packed if site.bits else call


def parted(
    site: FastAttention, programs: tuple[Program, Program], kernels: Sequence[Kernel], parts: int | None = None
) -> Call:
    """(q, k, v[, rows]) in two launches; `parts` blocks share the rows of a head, by default as many as they need."""
    shapes, dtypes, unit, plain = site.shapes(1), (mx.bfloat16,), site.unit, site.plain
    reading, adding = programs
    threads, ends = (reading.threads, 1, 1), (adding.threads, 1, 1)
    grid = (adding.threads * adding.blocks, site.heads, 1)
    read, add = kernels
    bits, heads, size = site.bits, site.heads, site.head_dim

    def call(q: mx.array, k: Any, v: Any, *rows: mx.array) -> Any:
        if q.size != unit:
            return plain(q, k, v, *rows)
        inputs, first = ((q, *k, *v, *rows), k[0]) if bits else ((q, k, v, *rows), k)
        count = parts or parts_for(first.shape[2])
        left = read(
            inputs=inputs,
            output_shapes=((heads, count, size), (heads, count, 2)),
            output_dtypes=FLOATS,
            grid=(reading.threads * count, reading.lines, 1),
            threadgroup=threads,
        )
        return add(inputs=left, output_shapes=shapes, output_dtypes=dtypes, grid=grid, threadgroup=ends)[0]

    return call


def parts_for(rows: int) -> int:
    return max(LEAST_PARTS, min(MOST_PARTS, rows // ROWS_OF_A_PART))


def by_length(site: FastAttention, short: Call, long: Call, limit: int) -> Call:
    """`short` up to `limit` rows (of the buffers, which is what is known here), `long` beyond."""
    if site.bits:

        def packed(q: mx.array, k: Any, v: Any, *rows: mx.array) -> Any:
            return (short if k[0].shape[2] <= limit else long)(q, k, v, *rows)

        return packed

    def call(q: mx.array, k: Any, v: Any, *rows: mx.array) -> Any:
        return (short if k.shape[2] <= limit else long)(q, k, v, *rows)

    return call
