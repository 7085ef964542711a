"""The copies that MLX's products make of rows that lie token by token, made where MLX's graph can order them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from .draw import Draw
from .into import QKVRopeInto, private
from .program import Program, Unsupported
from .resolve import resolve
from .site import Call, Kernel, Outputs, Site

READS = 8  # values, and rows, that a thread takes
GROUPS = 4  # neighbouring threads with neighbouring rows: what they write of a column are whole sectors
LENGTHS = (512, 1024, 1, 7, 8, 31, 33, 100, 1000)


@dataclass(frozen=True)
class HeadCopies(Site):
    """(q, k, v) -> keys, [1, kv_heads, repeats, head_dim, rows], and values, [1, kv_heads, repeats, rows, head_dim].

    k, v: [1, kv_heads, 1, head_dim, rows] and [1, kv_heads, 1, rows, head_dim], views of rows whose values are
    neighbours and begin at multiples of 16 bytes. q: what `into` gives when it has written the last of them. MLX makes
    the same copies within its products, but on CUDA orders them by who is known to write what they read: nobody. So
    they could be made before the row is there. These wait for q.
    """

    into: QKVRopeInto

    seeds: ClassVar[int] = 2 * len(LENGTHS)
    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.into.rope.heads * self.into.rope.head_dim

    @property
    def repeats(self) -> int:
        """Query heads of a KV head."""
        return self.into.rope.heads // self.into.rope.kv_heads

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """For the first of LENGTHS: it is the rows of k, not the batch, that they follow."""
        return self._shapes(LENGTHS[0])

    def _shapes(self, count: int) -> tuple[tuple[int, ...], ...]:
        heads, head_dim = (1, self.into.rope.kv_heads, self.repeats), self.into.rope.head_dim
        return (*heads, head_dim, count), (*heads, count, head_dim)

    def plain(self, *inputs: Any) -> Outputs:
        _, k, v, *_ = inputs
        keys, values = self._shapes(k.shape[4])
        return mx.contiguous(mx.broadcast_to(k, keys)), mx.contiguous(mx.broadcast_to(v, values))

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        """With every other seed what `into` takes comes behind, which writes the last of the rows: see `observed`."""
        if seed % 2:
            writing = self.into.inputs(seed, rows, dtype)
            written: Any = self.into.plain(*writing)
            q, keys, values = written
            return q, *self._views(keys, values, writing[-2]), *writing
        rope, draw, count = self.into.rope, Draw(seed, dtype), LENGTHS[seed // 2 % len(LENGTHS)]
        # A cache has room for more rows than it shows.
        shape = (1, count + 256 * (seed % 4 > 1), rope.kv_heads, rope.head_dim)
        k, v = (mx.expand_dims(draw.normal(*shape)[:, :count].swapaxes(1, 2), 2) for _ in range(2))
        return draw.normal(*self.into.shapes(1)[0]), k.swapaxes(-1, -2), v

    def _views(self, keys: mx.array, values: mx.array, ring: mx.array) -> tuple[mx.array, mx.array]:
        """k and v, of buffers that lie as `ring` says."""
        kv_heads, head_dim = self.into.rope.kv_heads, self.into.rope.head_dim
        told: Any = ring.tolist()
        _, count, *steps = told
        k_head, k_row, v_head, v_row = (step * head_dim for step in steps)
        k = mx.as_strided(keys, (1, kv_heads, 1, head_dim, count), (keys.size, k_head, k_head, 1, k_row))
        v = mx.as_strided(values, (1, kv_heads, 1, count, head_dim), (values.size, v_head, v_head, v_row, 1))
        return k, v

    def observed(self, call: Call) -> Callable[..., Outputs]:
        """Where `into` is to write a row, it is asked to in the same graph, so that too early a copy is seen."""

        def observed(q: mx.array, k: mx.array, v: mx.array, *writing: Any) -> Any:
            if not writing:
                return call(q, k, v)
            *own, keys, values, ring, after = writing
            keys, values = private(keys), private(values)
            q = resolve(self.into, after.dtype)(*own, keys, values, ring, after)
            return call(q, *self._views(keys, values, ring))

        return observed

    def program(self, backend: str) -> Program:
        if backend != "cuda":
            raise Unsupported("keys and values are written in place on CUDA alone")
        rope = self.into.rope
        if rope.head_dim % 64:
            raise Unsupported(f"heads of {rope.head_dim}; the kernel of their copies is for multiples of 64")
        return Program(
            backend,
            "head_copies",
            headers=("head_copies.h",),
            constants=(("HEAD_DIM", rope.head_dim), ("REPEATS", self.repeats), ("GROUPS", GROUPS)),
            inputs=("q", "k", "v"),
            outputs=("keys", "values"),
            arguments=("k", "v", "k_shape", "k_strides", "v_strides", "keys", "values"),
            threads=rope.head_dim // READS * GROUPS,
            blocks=2 * rope.heads,
            contiguous=False,
        )

    def launched(self, program: Program, kernel: Kernel, dtype: mx.Dtype) -> Call:
        width, threads, dtypes = program.threads * program.blocks, (program.threads, 1, 1), (dtype, dtype)
        shapes, taken = self._shapes, GROUPS * READS

        def copies(*inputs: mx.array) -> Any:
            count = inputs[1].shape[4]
            return kernel(
                inputs=inputs,
                output_shapes=shapes(count),
                output_dtypes=dtypes,
                grid=(width, -(-count // taken), 1),
                threadgroup=threads,
            )

        return copies
