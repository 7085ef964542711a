"""The large quantized products of one token, read from memory faster than MLX's own kernel reads them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from ..ops import geglu
from .draw import Draw
from .program import Program, Unsupported
from .site import Outputs, Site


@dataclass(frozen=True)
class QuantizedMatvec(Site):
    """(x, w, scales, biases) -> x @ w.T for affine weights; with glu, geglu of the first half of it and the second.

    x: [1, 1, inputs]; w: uint32 [outputs, inputs * bits / 32]; scales, biases: [outputs, inputs / group_size].
    Result: [1, 1, outputs], or half of it with glu. Costs the host more than MLX's own: for the large products only.
    """

    inputs_size: int
    outputs_size: int
    bits: int = 4
    group_size: int = 64
    glu: bool = False

    seeds: ClassVar[int] = 8
    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.inputs_size

    @property
    def width(self) -> int:
        return self.outputs_size // 2 if self.glu else self.outputs_size

    @property
    def packed_bytes(self) -> int:
        """Of the weights, without their scales and biases."""
        return self.outputs_size * self.inputs_size * self.bits // 8

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.width),)

    def plain(self, *inputs: Any) -> Outputs:
        x, w, scales, biases = inputs
        y: mx.array = mx.quantized_matmul(
            x, w, scales=scales, biases=biases, transpose=True, group_size=self.group_size, bits=self.bits
        )
        return geglu(*mx.split(y, 2, axis=-1)) if self.glu else y

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        size, groups = self.inputs_size, (self.outputs_size, self.inputs_size // self.group_size)
        x = draw.normal(rows, 1, size, scales=(0.05, 1.0, 20.0))
        w = draw.packed(self.outputs_size, size * self.bits // 32)
        # Weights of a standard deviation about size**-0.5 and a mean near 0, as trained ones have.
        step = size**-0.5 * 4 / 2**self.bits
        scales = (mx.random.uniform(0.5, 1.5, groups, key=draw.key()) * step).astype(dtype)
        biases = ((mx.random.normal(groups, key=draw.key()) * 0.05 - 0.5) * step * 2**self.bits).astype(dtype)
        return x, w, scales, biases

    def program(self, backend: str) -> Program:
        if backend != "cuda":
            raise Unsupported("MLX's own kernel is used on Metal")
        if self.bits not in (4, 8) or self.group_size not in (32, 64, 128):
            raise Unsupported(f"{self.bits}-bit weights in groups of {self.group_size}; the kernel is for 4 and 8 bits")
        if self.inputs_size % self.group_size or self.outputs_size % 2:
            raise Unsupported(
                f"{self.outputs_size} x {self.inputs_size} weights; expected whole groups, an even number"
            )
        large = self.outputs_size > 8192
        rows, unrolled = (2, 4) if large or self.glu else (1, 8)
        warps = 8
        names = ("x", "w", "s", "b", "y")
        return Program(
            backend,
            "quantized_matvec",
            headers=("gelu.h", "matvec_geglu.h", "matvec.h") if self.glu else ("matvec_rows.h", "matvec.h"),
            constants=(
                *(("INPUTS", self.inputs_size), ("OUTPUTS", self.outputs_size)),
                *(("BITS", self.bits), ("GROUP", self.group_size), ("GLU", self.glu)),
                *(("ROWS", rows), ("UNROLLED", unrolled), ("BLOCK", 32 * warps)),
            ),
            inputs=names[:4],
            outputs=names[4:],
            arguments=names,
            threads=32 * warps,
            blocks=-(-self.width // (warps * (1 if self.glu else rows))),
        )
