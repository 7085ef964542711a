"""Attention of one token over the keys and values of its cache, without a mask."""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from .draw import Draw
from .heads import OverHeads
from .program import Program, Unsupported
from .scores import AttentionScores
from .site import Call, Outputs

LENGTHS = (1, 2, 17, 63, 300, 512, 600, 1024, 1100, 2049, 3000)


@dataclass(frozen=True)
class Attention(OverHeads):
    """(q, k, v) -> [1, 1, heads * head_dim]. q: [1, heads, 1, head_dim]; k, v: [1, kv_heads, rows, head_dim].

    Where MLX has no fused attention (CUDA at these head sizes), its fallback written out: without the product with a
    scale of 1, and without what the fallback costs the host. Where it has one, the written-out form is not exact.
    """

    seeds: ClassVar[int] = 2 * len(LENGTHS)

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.unit),)

    def plain(self, *inputs: Any) -> Outputs:
        q, k, v = inputs
        y: mx.array = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=None).reshape(1, 1, self.unit)
        return y

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        length = LENGTHS[seed % len(LENGTHS)]
        # A cache has room for more rows than it hands out.
        shape = (rows, self.kv_heads, length + 256 * (seed % 2), self.head_dim)
        q = draw.normal(rows, self.heads, 1, self.head_dim, scales=(1.0, 0.2))
        return q, draw.normal(*shape)[..., :length, :], draw.normal(*shape)[..., :length, :]

    def program(self, backend: str) -> Program:
        raise Unsupported("no kernel of ours is exact here")

    def form(self, backend: str) -> Call | None:
        if backend != "cuda":
            return None
        repeats, shape = self.repeats, (1, self.kv_heads, self.repeats, 1, self.head_dim)
        result = (1, 1, self.unit)

        def alone(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            y: mx.array = (mx.softmax(q @ k.swapaxes(-1, -2), axis=-1, precise=True) @ v).reshape(result)
            return y

        def grouped(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            scores = q.reshape(shape) @ mx.expand_dims(k, 2).swapaxes(-1, -2)
            y: mx.array = (mx.softmax(scores, axis=-1, precise=True) @ mx.expand_dims(v, 2)).reshape(result)
            return y

        return alone if repeats == 1 else grouped

    @property
    def scores(self) -> AttentionScores:
        """The first half, of q and k in the shapes that the products take."""
        return AttentionScores(self.heads, self.kv_heads, self.head_dim)

    def over_views(self, scores: Call) -> Call:
        """As the written-out form, of q, k and v in the shapes that its products take. scores: of `self.scores`."""
        result = (1, 1, self.unit)

        def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            y: mx.array = (scores(q, k) @ v).reshape(result)
            return y

        return attention
