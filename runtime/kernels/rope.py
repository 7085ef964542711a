"""From the joined projections of one token to q, k and v: norms and rotary positions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..ops import proportional_freqs
from .draw import Draw
from .program import Program, Unsupported, float32
from .site import Outputs, Site


@dataclass(frozen=True)
class QKVRope(Site):
    """(qkv, q_norm, [k_norm], position, [freqs]) -> q, k, v; or q alone where kv_heads is 0 (a reader of shared K/V).

    qkv: [B, 1, width * head_dim], heads of q, then k, then v; no v where k_eq_v, then v is the raw k.
    q_norm, k_norm: [head_dim]. position: int32, a scalar or one for each row, as mx.array(cache.offset) makes it.
    freqs: float32 [head_dim / 2], given if theta is None. q: [B, heads, 1, head_dim]; k, v: [B, kv_heads, 1, head_dim].
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float | None = None
    k_eq_v: bool = False
    grouped: int = 0  # q as [B, grouped, heads / grouped, 1, head_dim], for attention over so many KV heads

    @property
    def width(self) -> int:
        """Heads in a row of qkv."""
        return self.heads + (1 if self.k_eq_v else 2) * self.kv_heads

    @property
    def unit(self) -> int:
        return self.width * self.head_dim

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        heads = (self.heads, self.kv_heads, self.kv_heads) if self.kv_heads else (self.heads,)
        q, *kv = ((rows, count, 1, self.head_dim) for count in heads)
        return ((rows, self.grouped, self.heads // self.grouped, 1, self.head_dim) if self.grouped else q, *kv)

    def shapes_of_block(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        """A token's heads are neighbours, here as in what it reads."""
        return self.shapes(batch * length)

    def plain(self, *inputs: Any) -> Outputs:
        qkv, *rest = inputs
        q_norm, k_norm, position, freqs = self._named(*rest)
        if k_norm is None:
            q = self._rope(self._norm(qkv, self.heads, q_norm), position, freqs)
            return q.reshape(self.shapes(q.shape[0])[0]) if self.grouped else q
        cut = self.heads * self.head_dim
        if self.k_eq_v:
            q, k = mx.split(qkv, [cut], axis=-1)
            v = k
        else:
            q, k, v = mx.split(qkv, [cut, cut + self.kv_heads * self.head_dim], axis=-1)
        q = self._rope(self._norm(q, self.heads, q_norm), position, freqs)
        k = self._rope(self._norm(k, self.kv_heads, k_norm), position, freqs)
        return q, k, self._norm(v, self.kv_heads, None)

    def over_block(self, parts: Sequence[mx.array], *rest: Any) -> Outputs:
        """`plain` for several tokens of each sequence, in mlx-lm's order: q [B, heads, L, head_dim]; k, v likewise.

        parts: q, k and v as projected, [B, L, heads * head_dim] each, as many as there are. The others as `plain` takes
        them, position that of the first token.
        """
        q_norm, k_norm, position, freqs = self._named(*rest)
        q = self._rope(self._normed(parts[0], self.heads, q_norm), position, freqs)
        if k_norm is None:
            return q
        values = self._normed(parts[-1], self.kv_heads, None)
        return q, self._rope(self._normed(parts[1], self.kv_heads, k_norm), position, freqs), values

    def _named(self, q_norm: mx.array, *rest: mx.array) -> tuple[mx.array, mx.array | None, mx.array, mx.array | None]:
        """q_norm, k_norm, position, freqs: None what this site does without."""
        k_norm, rest = (rest[0], rest[1:]) if self.kv_heads else (None, rest)
        return q_norm, k_norm, rest[0], rest[1] if self.theta is None else None

    def _normed(self, x: mx.array, heads: int, weight: mx.array | None) -> mx.array:
        rows = x.reshape(*x.shape[:2], heads, self.head_dim)
        normed: mx.array = mx.fast.rms_norm(rows, weight, self.eps).transpose(0, 2, 1, 3)
        return normed

    def _norm(self, x: mx.array, heads: int, weight: mx.array | None) -> mx.array:
        """For one token a reshape does what mlx-lm's reshape and transpose do."""
        normed: mx.array = mx.fast.rms_norm(x.reshape(-1, heads, 1, self.head_dim), weight, self.eps)
        return normed

    def _rope(self, x: mx.array, position: mx.array, freqs: mx.array | None) -> mx.array:
        turned: mx.array = mx.fast.rope(
            x, self.head_dim, traditional=False, base=self.theta, scale=1.0, offset=position, freqs=freqs
        )
        return turned

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        qkv = draw.normal(rows, 1, self.unit, scales=(0.02, 1.0, 20.0))
        norms = [draw.norm(self.head_dim) for _ in range(2 if self.kv_heads else 1)]
        return (qkv, *norms, draw.position(rows), *self._freqs())

    def _freqs(self) -> tuple[mx.array, ...]:
        """Any would do; these are the published ones, infinite where nothing turns."""
        if self.theta is not None:
            return ()
        return (proportional_freqs(dims=self.head_dim, rotated=self.head_dim // 4, base=1e6, factor=1.0),)

    def program(self, backend: str) -> Program:
        outputs = ("q", "k", "v") if self.kv_heads else ("q",)
        return self.rendered(backend, "qkv_rope", outputs, outputs if self.kv_heads else ("q", "q", "q"))

    def rendered(
        self,
        backend: str,
        function: str,
        outputs: tuple[str, ...],
        results: tuple[str, ...],
        inputs: tuple[str, ...] = (),
        headers: tuple[str, ...] = (),
    ) -> Program:
        """The kernel of one of the device functions over this row. results: its last arguments. Raises Unsupported."""
        if self.head_dim % 8 or self.head_dim > 512:
            raise Unsupported(f"heads of {self.head_dim}; the kernel is for multiples of 8 up to 512")
        reading = 64 if backend == "cuda" else 32 * -(-self.head_dim // 128)  # threads of MLX's rms_norm
        threads = max(reading, 32 * -(-self.head_dim // 64))
        has_kv, has_freqs = self.kv_heads > 0, self.theta is None
        log2_theta = 0.0 if self.theta is None else math.log2(float32(self.theta))
        return Program(
            backend,
            function,
            headers=("rms.h", "qkv_rope.h", *headers),
            constants=(
                *(("HEADS", self.heads), ("KV_HEADS", self.kv_heads), ("HEAD_DIM", self.head_dim)),
                *(("WIDTH", self.unit), ("K_EQ_V", self.k_eq_v), ("EPS", float(self.eps))),
                *(("USES_FREQS", has_freqs), ("LOG2_THETA", log2_theta)),
                *(("BLOCK", threads), ("WARPS", reading // 32)),
            ),
            inputs=("qkv", "qn", *(("kn",) if has_kv else ()), "at", *(("freqs",) if has_freqs else ()), *inputs),
            outputs=outputs,
            arguments=("qkv", "qn", "kn" if has_kv else "qn", "at", "freqs" if has_freqs else "qn", *results),
            threads=threads,
            blocks=self.heads + 2 * self.kv_heads,
            shared=(("float", "sums", reading // 32), ("straightline::T", "head", self.head_dim)),
        )

    def spread(self, inputs: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
        """The kernel reads one position for each row."""
        where = 3 if self.kv_heads else 2
        position = inputs[where]
        if position.size == rows:
            return inputs
        return (*inputs[:where], mx.broadcast_to(position.reshape(-1), (rows,)), *inputs[where + 1 :])
