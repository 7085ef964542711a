"""The gates: gelu of one half of a row times the other, and gelu of a projection times a per-layer input."""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from ..ops import geglu, gelu_approx
from .draw import Draw
from .program import Program, Unsupported
from .site import Call, Outputs, Site

READS = {"cuda": 8, "metal": 4}


@dataclass(frozen=True)
class Geglu(Site):
    """mlx-lm's compiled geglu. Joined: (gate_up) -> y; apart: (gate, up) -> y.

    gate, up, y: [B, 1, size], or with experts [B, 1, experts, 1, size]. gate_up: the same, 2 * size wide, gate first.
    """

    size: int
    joined: bool = True
    experts: int = 0

    seeds: ClassVar[int] = 12

    @property
    def unit(self) -> int:
        return (2 if self.joined else 1) * self.size * (self.experts or 1)

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return (self._shape(rows, self.size),)

    def _shape(self, rows: int, width: int) -> tuple[int, ...]:
        return (rows, 1, self.experts, 1, width) if self.experts else (rows, 1, width)

    def plain(self, *inputs: Any) -> Outputs:
        gate, up = mx.split(inputs[0], 2, axis=-1) if self.joined else inputs
        y: mx.array = geglu(gate, up)
        return y

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        shape = self._shape(rows, self.size)
        gate = draw.finite(*shape) if seed % 2 else draw.normal(*shape, scales=(0.3, 0.3, 1.0, 1.0, 4.0, 4.0))
        up = draw.normal(*shape)
        return (mx.concatenate([gate, up], axis=-1),) if self.joined else (gate, up)

    def program(self, backend: str) -> Program:
        if self.size % 8:
            raise Unsupported(f"rows of {self.size} values; the kernel is for multiples of 8")
        inputs = ("gate",) if self.joined else ("gate", "up")
        # Experts apart lie one after the other: one long line.
        size, lines = (self.size, self.experts or 1) if self.joined else (self.unit, 1)
        return Program(
            backend,
            "geglu_joined" if self.joined else "geglu_apart",
            headers=("gelu.h", "geglu.h"),
            constants=(("SIZE", size), ("BLOCK", 64), ("LAYERS", 1)),
            inputs=inputs,
            outputs=("y",),
            arguments=(*inputs, "y"),
            threads=64,
            blocks=-(-size // (64 * READS[backend])),
            lines=lines,
        )


@dataclass(frozen=True)
class PerLayerGate(Site):
    """(gate, per_layer, layer) -> gelu_approx(gate) * per_layer[:, :, layer, :].

    gate and output [B, 1, size]; per_layer [B, 1, layers, size]; layer: a Python int.
    """

    size: int
    layers: int

    seeds: ClassVar[int] = 48

    @property
    def unit(self) -> int:
        return self.size

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.size),)

    def plain(self, *inputs: Any) -> Outputs:
        gate, per_layer, layer = inputs
        product: mx.array = gelu_approx(gate) * per_layer[:, :, layer, :]
        return product

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        shape = (rows, 1, self.size)
        gate = draw.finite(*shape) if seed % 2 else draw.normal(*shape, scales=(0.3, 0.3, 1.0, 1.0, 4.0, 4.0))
        return gate, draw.normal(rows, 1, self.layers, self.size), seed % self.layers

    def program(self, backend: str) -> Program:
        if self.size % 8 or self.size > 2048:
            raise Unsupported(f"rows of {self.size} values; the kernel is for multiples of 8 up to 2048")
        threads = 32 * -(-self.size // (32 * READS[backend]))
        return Program(
            backend,
            "per_layer_gate",
            headers=("gelu.h", "geglu.h"),
            constants=(("SIZE", self.size), ("BLOCK", threads), ("LAYERS", self.layers)),
            inputs=("gate", "rows", "layer"),
            outputs=("y",),
            arguments=("gate", "rows", "layer", "y"),
            threads=threads,
        )

    def wrap(self, call: Call) -> Call:
        """The kernel reads the layer from an array; these are made once. Without dimensions, they index like an int."""
        indices = self._indices()

        def per_layer_gate(gate: mx.array, per_layer: mx.array, layer: int) -> Any:
            return call(gate, per_layer, indices[layer])

        return per_layer_gate

    def _indices(self) -> list[mx.array]:
        indices = [mx.array(layer, dtype=mx.int32) for layer in range(self.layers)]
        mx.eval(indices)
        return indices
