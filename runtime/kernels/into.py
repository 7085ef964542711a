"""QKVRope of one token whose keys and values go straight to their row of a cache's buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from ..arrays import copied
from .draw import Draw
from .program import Program, Unsupported
from .rope import QKVRope
from .site import Call, Outputs, Site

ROWS = (1, 7, 256, 512, 768, 1024, 1280)


@dataclass(frozen=True)
class QKVRopeInto(Site):
    """(*inputs of rope, keys, values, ring, after) -> q, [1, kv_heads, heads / kv_heads, 1, head_dim].

    keys, values: [kv_heads * rows * head_dim], WRITTEN TO at row (position + ring[0]) mod ring[1] of each head, behind
    MLX's back: they must be nobody else's, and what reads them must depend on q. ring: int32 [2], the shift and the
    number of rows. after: any array of the dtype, of what must be done before the row is written over.
    """

    rope: QKVRope

    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.rope.unit

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        rope = self.rope
        return ((rows, rope.kv_heads, rope.heads // rope.kv_heads, 1, rope.head_dim),)

    def plain(self, *inputs: Any) -> Outputs:
        """q and the new buffers: what `observed` compares. Nothing is written to."""
        *own, keys, values, ring, _ = inputs
        rope, position = self.rope, own[3]
        q, k, v = rope.plain(*own)
        row, buffer = (position + ring[0]) % ring[1], (1, rope.kv_heads, -1, rope.head_dim)
        new = (mx.slice_update(old.reshape(buffer), one, row[None], (2,)) for old, one in ((keys, k), (values, v)))
        return (q.reshape(self.shapes(1)[0]), *(one.reshape(-1) for one in new))

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(1000 + seed, dtype)
        size = ROWS[seed % len(ROWS)]
        keys, values = (draw.normal(self.rope.kv_heads * size * self.rope.head_dim) for _ in range(2))
        ring = mx.array([(37 * seed) % size, size], dtype=mx.int32)
        return (*self.rope.inputs(seed, rows, dtype), keys, values, ring, draw.normal(1))

    def observed(self, call: Call) -> Callable[..., Outputs]:
        def observed(*inputs: Any) -> Outputs:
            *own, keys, values, ring, after = inputs
            keys, values = private(keys), private(values)
            q = call(*own, keys, values, ring, after)
            mx.eval(q)
            return q, keys, values

        return observed

    def program(self, backend: str) -> Program:
        if backend != "cuda":
            raise Unsupported("keys and values are written in place on CUDA alone")
        extra = ("keys", "values", "ring", "after")
        return self.rope.rendered(backend, "qkv_rope_into", ("q",), (*extra, "q"), extra, ("qkv_rope_into.h",))


def private(array: mx.array) -> mx.array:
    """A copy of the bits that shares no memory with anything. Evaluated."""
    copy = copied(array)
    mx.eval(copy)
    return copy
