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
    MLX's back: they must be nobody else's, and what reads them must depend on q. ring: int32 [6], see `ring_of`.
    after: any array of the dtype, of what must be done before the row is written over.
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
        q, k, v = self.rope.plain(*own)
        row = (own[3] + ring[0]) % ring[1]
        new = (self._written(keys, k, row, ring[2:4]), self._written(values, v, row, ring[4:6]))
        return (q.reshape(self.shapes(1)[0]), *new)

    def _written(self, buffer: mx.array, heads: mx.array, row: mx.array, steps: mx.array) -> mx.array:
        """The buffer with a token's heads in it."""
        places = mx.arange(self.rope.kv_heads) * steps[0] + row * steps[1]
        rows = buffer.reshape(-1, self.rope.head_dim)
        rows[places] = heads.reshape(-1, self.rope.head_dim)
        return rows.reshape(-1)

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(1000 + seed, dtype)
        size, kv_heads = ROWS[seed % len(ROWS)], self.rope.kv_heads
        keys, values = (draw.normal(kv_heads * size * self.rope.head_dim) for _ in range(2))
        ring = ring_of((37 * seed) % size, size, kv_heads, (seed % 2 == 1, seed % 4 > 1))
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


def ring_of(shift: int, rows: int, kv_heads: int, by_token: tuple[bool, bool]) -> mx.array:
    """int32 [6]: the shift, the number of rows, and how keys lie and how values do (`steps`)."""
    return mx.array([shift, rows, *(step for one in by_token for step in steps(one, kv_heads, rows))], dtype=mx.int32)


def steps(by_token: bool, kv_heads: int, rows: int) -> tuple[int, int]:
    """How far apart, in rows, the heads of a token lie in a buffer, and the tokens of a head."""
    return (1, kv_heads) if by_token else (rows, 1)


def private(array: mx.array) -> mx.array:
    """A copy of the bits that shares no memory with anything. Evaluated."""
    copy = copied(array)
    mx.eval(copy)
    return copy
