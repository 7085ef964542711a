"""The large quantized products of one token, read from memory faster than MLX's own kernel reads them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from ..ops import geglu, gelu_approx
from .draw import Draw
from .program import Program, Unsupported
from .site import Outputs, Site

WARPS = 8


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
        x = draw.normal(rows, 1, self.inputs_size, scales=(0.05, 1.0, 20.0))
        return x, *draw.quantized(self.outputs_size, self.inputs_size, self.bits, self.group_size)

    def program(self, backend: str) -> Program:
        constants = sizes(backend, self.inputs_size, self.outputs_size, self.bits, self.group_size, self.glu)
        rows, unrolled = (2, 4) if self.glu or self.outputs_size > 65536 else (1, 8)
        finish = ("gelu.h", "matvec_geglu.h") if self.glu else ("matvec_rows.h",)
        names = ("x", "w", "s", "b", "y")
        return Program(
            backend,
            "quantized_matvec",
            headers=("matvec.h", "matvec_block.h", *finish, "matvec_product.h"),
            constants=(*constants, ("ROWS", rows), ("UNROLLED", unrolled), ("BLOCK", 32 * WARPS)),
            inputs=names[:4],
            outputs=names[4:],
            arguments=names,
            threads=32 * WARPS,
            blocks=-(-self.width // (WARPS * (rows // 2 if self.glu else rows))),
        )


@dataclass(frozen=True)
class QuantizedPerLayerGate(Site):
    """(x, w, scales, biases, per_layer, layer) -> gelu_approx(x @ w.T) * per_layer[:, :, layer, :].

    x: [1, 1, inputs]; w: uint32 [size, inputs * bits / 32]; scales, biases: [size, inputs / group_size]; per_layer:
    [1, 1, layers, size]; layer: int32, an array without dimensions. Result: [1, 1, size].
    """

    inputs_size: int
    size: int
    layers: int
    bits: int = 4
    group_size: int = 64

    seeds: ClassVar[int] = 48
    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.inputs_size

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.size),)

    def plain(self, *inputs: Any) -> Outputs:
        x, w, scales, biases, per_layer, layer = inputs
        gate: mx.array = mx.quantized_matmul(
            x, w, scales=scales, biases=biases, transpose=True, group_size=self.group_size, bits=self.bits
        )
        product: mx.array = gelu_approx(gate) * mx.take(per_layer, layer, axis=2)
        return product

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        x = draw.normal(rows, 1, self.inputs_size, scales=(0.05, 0.3, 1.0, 3.0, 20.0))
        weights = draw.quantized(self.size, self.inputs_size, self.bits, self.group_size)
        per_layer = draw.normal(rows, 1, self.layers, self.size)
        return x, *weights, per_layer, mx.array(seed % self.layers, dtype=mx.int32)

    def program(self, backend: str) -> Program:
        constants = sizes(backend, self.inputs_size, self.size, self.bits, self.group_size)
        names = ("x", "w", "s", "b", "u", "l", "y")
        warps = 2  # rows are few
        return Program(
            backend,
            "quantized_per_layer_gate",
            headers=("gelu.h", "matvec.h", "matvec_block.h", "matvec_per_layer.h"),
            constants=(*constants, ("ROWS", 1), ("UNROLLED", 8), ("BLOCK", 32 * warps), ("LAYERS", self.layers)),
            inputs=names[:-1],
            outputs=names[-1:],
            arguments=names,
            threads=32 * warps,
            blocks=-(-self.size // warps),
        )


def sizes(
    backend: str, inputs: int, outputs: int, bits: int, group_size: int, glu: bool = False
) -> tuple[tuple[str, int | float], ...]:
    """Constants of every kernel over quantized weights. Raises Unsupported."""
    if backend != "cuda":
        raise Unsupported("MLX's own kernel is used on Metal")
    if bits not in (4, 8) or group_size not in (32, 64, 128):
        raise Unsupported(f"{bits}-bit weights in groups of {group_size}; the kernel is for 4 and 8 bits")
    if inputs % group_size or outputs % 2:
        raise Unsupported(f"{outputs} x {inputs} weights; expected whole groups, an even number")
    return (
        *(("INPUTS", inputs), ("OUTPUTS", outputs)),
        *(("BITS", bits), ("GROUP", group_size), ("GLU", glu)),
    )
