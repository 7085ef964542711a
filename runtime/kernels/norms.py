"""Where one block ends and the next begins: post-norm, residual, layer scalar, and the norms that read the sum."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..ops import scaled_add
from .draw import Draw
from .program import Program, Unsupported
from .site import Outputs, Site

BRANCH_SCALES = (1e-3, 0.05, 1.0, 30.0)
STREAM_SCALES = (0.1, 1.0, 50.0)


def layout(backend: str, size: int) -> tuple[int, int]:
    """Threads, and vectors for each, that MLX's rms_norm takes for a row of bfloat16. Raises Unsupported."""
    if size % 8 or size > 8192:
        raise Unsupported(f"rows of {size} values; the kernel is for multiples of 8 up to 8192")
    if backend == "metal":  # vectors of 4; one pass to 4096 values, then 1024 threads in a loop
        return (32 * -(-size // 128), 1) if size <= 4096 else (1024, -(-size // 4096))
    vectors = size // 8
    if size <= 512:
        return 64, 1
    for block in (128, 64):
        if vectors % block == 0 and vectors // block <= 8:
            return block, vectors // block
    return 128, -(-vectors // 128)


@dataclass(frozen=True)
class ResidualNorms(Site):
    """(y, h, post_norm, [layer_scalar], *next_norms) -> h2, *x: h2 = (h + rms_norm(y)) [* scalar], x = rms_norm(h2).

    y, h and outputs [B, 1, size]; norm weights [size]; layer_scalar [1]. With norms=0 the call returns h2 alone.
    """

    size: int
    eps: float
    scaled: bool
    norms: int

    @property
    def unit(self) -> int:
        return self.size

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.size),) * (1 + self.norms)

    def plain(self, *inputs: Any) -> Outputs:
        y, h, post_norm, *rest = inputs
        y = mx.fast.rms_norm(y, post_norm, self.eps)
        h = scaled_add(h, y, rest.pop(0)) if self.scaled else h + y
        if not rest:
            return h
        return (h, *(mx.fast.rms_norm(h, weight, self.eps) for weight in rest))

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        y = draw.normal(rows, 1, self.size, scales=BRANCH_SCALES)
        h = draw.normal(rows, 1, self.size, scales=STREAM_SCALES)
        scalar = (draw.scalar(),) if self.scaled else ()
        return (y, h, draw.norm(self.size), *scalar, *(draw.norm(self.size) for _ in range(self.norms)))

    def program(self, backend: str) -> Program:
        weights = ("w0", "w1", "w2")[: self.norms]
        results = ("x0", "x1", "x2")[: self.norms]
        missing = 3 - self.norms
        return _program(
            backend,
            "residual_norms",
            self,
            inputs=("y", "h", "post", *(("scalar",) if self.scaled else ()), *weights),
            outputs=("h2", *results),
            arguments=(
                *("y", "h", "post", "scalar" if self.scaled else "post"),
                *(*weights, *("post",) * missing, "h2", *results, *("h2",) * missing),
            ),
            sums=2,
        )


@dataclass(frozen=True)
class DualResidualNorms(Site):
    """The end of a layer with experts: (a, b, h, a_norm, b_norm, post_norm, layer_scalar, next_norm) -> h2, x.

    h2 = (h + rms_norm(rms_norm(a) + rms_norm(b))) * layer_scalar; x = rms_norm(h2). a, b, h and outputs [B, 1, size].
    """

    size: int
    eps: float

    @property
    def scaled(self) -> bool:
        return True

    @property
    def norms(self) -> int:
        return 1

    @property
    def unit(self) -> int:
        return self.size

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.size),) * 2

    def plain(self, *inputs: Any) -> Outputs:
        a, b, h, a_norm, b_norm, post_norm, layer_scalar, next_norm = inputs
        y = mx.fast.rms_norm(a, a_norm, self.eps) + mx.fast.rms_norm(b, b_norm, self.eps)
        h = scaled_add(h, mx.fast.rms_norm(y, post_norm, self.eps), layer_scalar)
        return h, mx.fast.rms_norm(h, next_norm, self.eps)

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        shape = (rows, 1, self.size)
        a = draw.normal(*shape, scales=BRANCH_SCALES)
        b = draw.normal(*shape, scales=(1.0, 30.0, 1e-3))
        h = draw.normal(*shape, scales=STREAM_SCALES)
        norms = [draw.norm(self.size) for _ in range(4)]
        return (a, b, h, *norms[:3], draw.scalar(), norms[3])

    def program(self, backend: str) -> Program:
        inputs = ("a", "b", "h", "wa", "wb", "post", "scalar", "w0")
        outputs = ("h2", "x0")
        return _program(backend, "dual_residual_norms", self, inputs, outputs, (*inputs, *outputs), sums=4)


def _program(
    backend: str,
    function: str,
    site: ResidualNorms | DualResidualNorms,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    arguments: tuple[str, ...],
    sums: int,
) -> Program:
    threads, chunks = layout(backend, site.size)
    sizes = (("SIZE", site.size), ("BLOCK", threads), ("CHUNKS", chunks), ("EPS", float(site.eps)))
    return Program(
        backend,
        function,
        headers=("rms.h", "residual.h"),
        constants=(*sizes, ("SCALED", site.scaled), ("NORMS", site.norms)),
        inputs=inputs,
        outputs=outputs,
        arguments=arguments,
        threads=threads,
        shared=(("float", "sums", sums * (threads // 32)),),
    )
