"""The call of a site from its compiled kernel. Host time is what it is for: nothing is worked out twice."""

from typing import Any

import mlx.core as mx

from .program import Program
from .site import Call, Kernel, Site


def launcher(site: Site, program: Program, kernel: Kernel, dtype: mx.Dtype, several: bool) -> Call:
    """`several`: run the kernel for more than one row, too; else those rows go through the plain form."""
    own = site.launched(program, kernel, dtype)
    if own is not None:
        return own
    shapes, unit, threads, single = site.shapes(1), site.unit, (program.threads, 1, 1), len(program.outputs) == 1
    dtypes = site.dtypes(dtype)
    grid = (program.threads * program.blocks, program.lines, 1)
    rest = rows_launcher(site, program, kernel, dtype) if several and not site.one_row else site.plain

    if single:

        def call(*inputs: Any) -> Any:
            if inputs[0].size != unit:
                return rest(*inputs)
            return kernel(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes, grid=grid, threadgroup=threads)[0]

    else:

        def call(*inputs: Any) -> Any:
            if inputs[0].size != unit:
                return rest(*inputs)
            return kernel(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes, grid=grid, threadgroup=threads)

    return site.wrap(call)


def rows_launcher(site: Site, program: Program, kernel: Kernel, dtype: mx.Dtype) -> Call:
    """Any number of rows: the grid follows from the shape of the first input, [batch, length, ...]."""
    dtypes = site.dtypes(dtype)
    threads = (program.threads, 1, 1)
    launches: dict[tuple[int, ...], tuple[int, tuple[tuple[int, ...], ...], tuple[int, int, int]]] = {}

    def call(*inputs: Any) -> Any:
        batch, length, *_ = block = inputs[0].shape
        if block not in launches:
            rows = batch * length
            grid = (program.threads * program.blocks, program.lines * rows, 1)
            launches[block] = rows, site.shapes_of_block(batch, length), grid
        rows, shapes, grid = launches[block]
        results = kernel(
            inputs=site.spread(inputs, rows),
            output_shapes=shapes,
            output_dtypes=dtypes,
            grid=grid,
            threadgroup=threads,
        )
        return results[0] if len(results) == 1 else results

    return call
