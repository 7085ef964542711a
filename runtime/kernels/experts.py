"""What a token does with experts: which are chosen and what they weigh, and their quantized products."""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from ..ops import geglu
from .draw import Draw
from .matvec import sizes
from .program import Program, Unsupported
from .site import Outputs, Site

TILE = 8  # rows of a chosen expert's weights that a warp takes


@dataclass(frozen=True)
class Router(Site):
    """(scores, scales) -> chosen, gates: the top_k experts of a token, and softmax over their scores times scales.

    scores: [B, 1, experts]; scales: [experts]. chosen: uint32 [B, 1, top_k]; gates: [B, 1, top_k].
    """

    experts: int
    top_k: int

    seeds: ClassVar[int] = 200

    @property
    def unit(self) -> int:
        return self.experts

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.top_k),) * 2

    def dtypes(self, dtype: mx.Dtype) -> tuple[mx.Dtype, ...]:
        return mx.uint32, dtype

    def plain(self, *inputs: Any) -> Outputs:
        scores, scales = inputs
        chosen = mx.stop_gradient(mx.argpartition(scores, kth=-self.top_k, axis=-1)[..., -self.top_k :])
        gates: mx.array = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1) * scales[chosen]
        return chosen, gates

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        scores = draw.normal(rows, 1, self.experts, scales=(1.0, 4.0, 0.1, 30.0))
        if seed % 2:  # many equal ones
            scores = mx.round(scores * 2) / 2
        return scores, draw.norm(self.experts)

    def program(self, backend: str) -> Program:
        if backend != "cuda":
            raise Unsupported("how Metal's partition orders equal scores is not known")
        if self.top_k > 8 or self.experts > 1024:
            raise Unsupported(f"{self.top_k} of {self.experts} experts; the kernel is for up to 8 of 1024")
        return Program(
            backend,
            "router",
            headers=("router.h",),
            constants=(("COUNT", self.experts), ("TOP_K", self.top_k)),
            inputs=("x", "w"),
            outputs=("k", "g"),
            arguments=("x", "w", "k", "g"),
            threads=32 * -(-self.experts // 32),
            shared=(("straightline::T", "best", self.top_k),),
        )


@dataclass(frozen=True)
class QuantizedRouter(Site):
    """(x, w, scales, biases, expert_scales) -> chosen, gates: `Router` over the scores x @ w.T.

    x: [1, 1, inputs]; w: uint32 [experts, inputs * bits / 32]; scales, biases: [experts, inputs / group_size].
    """

    inputs_size: int
    experts: int
    top_k: int
    bits: int = 8
    group_size: int = 64

    seeds: ClassVar[int] = 100
    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.inputs_size

    @property
    def router(self) -> Router:
        return Router(self.experts, self.top_k)

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return self.router.shapes(rows)

    def dtypes(self, dtype: mx.Dtype) -> tuple[mx.Dtype, ...]:
        return self.router.dtypes(dtype)

    def plain(self, *inputs: Any) -> Outputs:
        x, w, scales, biases, expert_scales = inputs
        scores = mx.quantized_matmul(
            x, w, scales=scales, biases=biases, transpose=True, group_size=self.group_size, bits=self.bits
        )
        return self.router.plain(scores, expert_scales)

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        x = draw.normal(rows, 1, self.inputs_size, scales=(1.0, 4.0, 0.1, 30.0))
        return x, *draw.quantized(self.experts, self.inputs_size, self.bits, self.group_size), draw.norm(self.experts)

    def program(self, backend: str) -> Program:
        alone = self.router.program(backend)
        threads = 512
        if self.experts > threads:
            raise Unsupported(f"{self.top_k} of {self.experts} experts; the kernel is for up to 8 of {threads}")
        constants = sizes(backend, self.inputs_size, self.experts, self.bits, self.group_size)
        names = ("x", "w", "s", "b", "e", "k", "g")
        return Program(
            backend,
            "routed",
            headers=("matvec.h", "matvec_block.h", *alone.headers, "routed.h"),
            constants=(*constants, ("ROWS", 2), ("UNROLLED", 4), ("BLOCK", threads), *alone.constants),
            inputs=names[:5],
            outputs=names[5:],
            arguments=names,
            threads=threads,
            shared=(*alone.shared, ("straightline::T", "scores", self.experts)),
        )


@dataclass(frozen=True)
class _Quantized(Site):
    """Products with the chosen of many experts, whose weights are [experts, outputs, ..]."""

    inputs_size: int
    width: int
    top_k: int
    bits: int = 4
    group_size: int = 64

    seeds: ClassVar[int] = 3
    one_row: ClassVar[bool] = True

    def _gathered(self, x: mx.array, chosen: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        y: mx.array = mx.gather_qmm(
            x, w, scales, biases, rhs_indices=chosen, transpose=True, group_size=self.group_size, bits=self.bits
        )
        return y

    def _chosen(self, draw: Draw) -> mx.array:
        chosen = mx.random.permutation(2 * self.top_k, key=draw.key())[: self.top_k]
        return chosen.astype(mx.uint32).reshape(1, 1, -1)

    def _weights(self, draw: Draw) -> list[mx.array]:
        """Of twice as many experts as are chosen."""
        experts = 2 * self.top_k
        arrays = draw.quantized(experts * self.width, self.inputs_size, self.bits, self.group_size)
        return [array.reshape(experts, self.width, -1) for array in arrays]

    def _sizes(self, backend: str) -> tuple[tuple[str, int | float], ...]:
        """Constants of the kernel. Raises Unsupported, also where MLX takes another kernel than the one followed."""
        if backend != "cuda":
            raise Unsupported("MLX's own kernel is used on Metal")
        if not 8 <= self.top_k <= 16:
            raise Unsupported(f"{self.top_k} experts a token; the kernel is for 8 to 16")
        if self.bits != 4:
            raise Unsupported(f"{self.bits}-bit weights of experts; the kernel is for 4 bits")
        columns = max(64, self.group_size)
        if self.width % TILE or self.inputs_size % columns:
            weights = f"{self.width} x {self.inputs_size} weights of experts"
            raise Unsupported(f"{weights}; expected a multiple of {TILE} x one of {columns}")
        return ("INPUTS", self.inputs_size), ("OUTPUTS", self.width), ("GROUP", self.group_size), ("TOP_K", self.top_k)


@dataclass(frozen=True)
class GatedExperts(_Quantized):
    """(x, chosen, gate, scales, biases, up, scales, biases) -> geglu of both products of each chosen expert.

    x: [1, 1, inputs]; chosen: uint32 [1, 1, top_k]; gate, up: uint32 [experts, width, inputs * bits / 32], each with
    scales and biases [experts, width, inputs / group_size]. Result: [1, 1, top_k, 1, width].
    """

    @property
    def unit(self) -> int:
        return self.inputs_size

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.top_k, 1, self.width),)

    def plain(self, *inputs: Any) -> Outputs:
        x, chosen, *weights = inputs
        x = x.reshape(1, 1, 1, 1, self.inputs_size)
        gate, up = (self._gathered(x, chosen, *weights[start : start + 3]) for start in (0, 3))
        y: mx.array = geglu(gate, up)
        return y

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        x = draw.normal(rows, 1, self.inputs_size, scales=(0.05, 1.0, 20.0))
        return x, self._chosen(draw), *self._weights(draw), *self._weights(draw)

    def program(self, backend: str) -> Program:
        names = ("x", "k", "gw", "gs", "gb", "uw", "us", "ub", "y")
        return Program(
            backend,
            "quantized_experts",
            headers=("gelu.h", "experts_tile.h", "experts.h"),
            constants=self._sizes(backend),
            inputs=names[:-1],
            outputs=names[-1:],
            arguments=names,
            threads=32 * 2,
            blocks=self.width // TILE,
            lines=self.top_k,
            shared=(("straightline::T", "both", 2 * TILE),),
        )


@dataclass(frozen=True)
class SummedExperts(_Quantized):
    """(x, chosen, gates, w, scales, biases) -> the sum over the chosen experts of gate * product.

    x: [1, 1, top_k, 1, inputs]; chosen: uint32 [1, 1, top_k]; gates: [1, 1, top_k]; w: uint32 [experts, width, inputs *
    bits / 32]; scales, biases: [experts, width, inputs / group_size]. Result: [1, 1, width].
    """

    @property
    def unit(self) -> int:
        return self.top_k * self.inputs_size

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.width),)

    def plain(self, *inputs: Any) -> Outputs:
        x, chosen, gates, *weights = inputs
        y = self._gathered(x, chosen, *weights).reshape(1, 1, self.top_k, self.width)
        total: mx.array = (mx.expand_dims(gates, -1) * y).sum(-2)
        return total

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        x = draw.normal(rows, 1, self.top_k, 1, self.inputs_size, scales=(0.05, 1.0, 20.0))
        return x, self._chosen(draw), draw.normal(1, 1, self.top_k, scales=(0.2, 1.0)), *self._weights(draw)

    def program(self, backend: str) -> Program:
        names = ("x", "k", "g", "w", "s", "b", "y")
        return Program(
            backend,
            "quantized_experts_sum",
            headers=("experts_tile.h", "experts_sum.h"),
            constants=self._sizes(backend),
            inputs=names[:-1],
            outputs=names[-1:],
            arguments=names,
            threads=32 * self.top_k,
            blocks=self.width // TILE,
            shared=(("straightline::T", "each", self.top_k * TILE),),
        )
