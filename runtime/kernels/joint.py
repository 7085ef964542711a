"""A product of one token and the site that reads it, in one launch.

The blocks of a cluster share out the rows of the weights and hand what they find to its first block, which does the
rest: QuantizedMatvec's arithmetic, then the site's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx

from .draw import Draw
from .fast import CLUSTER
from .into import QKVRopeInto
from .matvec import QuantizedMatvec, QuantizedPerLayerGate, sizes
from .norms import ResidualNorms
from .program import Program
from .rope import QKVRope
from .site import Call, Outputs, Site

THREADS = 512
MATVEC = ("matvec.h", "cluster.h", "matvec_cluster.h")
PRODUCT = ("x", "w", "s", "b")


@dataclass(frozen=True)
class ProductHeads(Site):
    """(x, w, scales, biases, *inputs of rope but the first) -> the outputs of rope, whose first input is the product.

    A cluster a head.
    """

    product: QuantizedMatvec
    rope: QKVRope | QKVRopeInto

    seeds: ClassVar[int] = 14
    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.product.unit

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return self.rope.shapes(rows)

    def plain(self, *inputs: Any) -> Outputs:
        return self.rope.plain(self.product.plain(*inputs[:4]), *inputs[4:])

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        return *self.product.inputs(seed, rows, dtype), *self.rope.inputs(seed, rows, dtype)[1:]

    def observed(self, call: Call) -> Callable[..., Outputs]:
        return self.rope.observed(call)

    def program(self, backend: str) -> Program:
        rope = self.rope.program(backend)
        head_dim = self.rope.rope.head_dim if isinstance(self.rope, QKVRopeInto) else self.rope.head_dim
        threads = max(256, rope.threads)
        into = ("joint_heads_into.h",) if isinstance(self.rope, QKVRopeInto) else ()
        return replace(
            rope,
            function="joint_heads_into" if into else "joint_heads",
            headers=(*MATVEC, *rope.headers, "joint_heads.h", *into),
            constants=(*_sizes(backend, self.product), *_cluster(threads, 4), *rope.constants),
            inputs=(*PRODUCT, *rope.inputs[1:]),
            arguments=(*PRODUCT, *rope.arguments[1:]),
            threads=threads,
            blocks=rope.blocks * CLUSTER,
            shared=(*rope.shared, ("straightline::T", "raw", head_dim)),
        )


@dataclass(frozen=True)
class PerLayerEnd(Site):
    """All that follows the MLP of a layer with a per-layer input: `before`, `gate`, `projection`, `norms`.

    (*inputs of before, weights, scales, biases, per_layer, layer, weights, scales, biases, post_norm, [scalar],
    *next_norms) -> the outputs of norms. The stream is what `before` gives, which has no scalar and no norms.
    """

    before: ResidualNorms
    gate: QuantizedPerLayerGate
    projection: QuantizedMatvec
    norms: ResidualNorms

    seeds: ClassVar[int] = 24
    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.before.unit

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return self.norms.shapes(rows)

    def plain(self, *inputs: Any) -> Outputs:
        h = self.before.plain(*inputs[:3])
        gated = self.gate.plain(h, *inputs[3:8])
        return self.norms.plain(self.projection.plain(gated, *inputs[8:11]), h, *inputs[11:])

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        gate, one = self.gate.inputs(seed, rows, dtype), self.projection
        weights = Draw(1000 + seed, dtype).quantized(one.outputs_size, one.inputs_size, one.bits, one.group_size)
        before, after = self.before.inputs(seed, rows, dtype), self.norms.inputs(seed, rows, dtype)
        return *before, *gate[1:], *weights, *after[2:]

    def program(self, backend: str) -> Program:
        norms, gate, projection = self.norms.program(backend), self.gate, self.projection
        _sizes(backend, projection)
        first = ("y", "h", "before", *PRODUCT[1:], "u", "l", "pw", "ps", "pb")
        return replace(
            norms,
            function="joint_per_layer",
            headers=("gelu.h", *MATVEC, *norms.headers, "joint_per_layer.h"),
            constants=(
                *(("GATES", gate.size), ("BITS", gate.bits), ("GROUP", gate.group_size)),
                *(("PROJECTION_BITS", projection.bits), ("PROJECTION_GROUP", projection.group_size)),
                *(*_cluster(THREADS, 10), *norms.constants),
            ),
            inputs=(*first, *norms.inputs[2:]),
            arguments=(*first, *norms.arguments[2:]),
            threads=THREADS,
            blocks=CLUSTER,
            shared=(
                *(("straightline::T", name, size) for name, size in (("stream", self.unit), ("gated", gate.size))),
                *(("straightline::T", "row", self.unit), *norms.shared),
            ),
        )


def _sizes(backend: str, product: QuantizedMatvec) -> tuple[tuple[str, int | float], ...]:
    """Raises Unsupported."""
    return sizes(backend, product.inputs_size, product.outputs_size, product.bits, product.group_size)


def _cluster(threads: int, rows: int) -> tuple[tuple[str, int], ...]:
    return ("ROWS", rows), ("UNROLLED", 4), ("CLUSTER", CLUSTER), ("THREADS", threads)
