"""The probabilities of one token's attention: its products with the keys of a cache and softmax over them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from .draw import Draw
from .fast import CLUSTER
from .heads import OverHeads
from .program import Program, Unsupported
from .site import Call, Kernel, Outputs

THREADS = 512
# Beyond, eight blocks a head are too few beside MLX's own kernels, which take as many as there are rows.
MOST_ROWS = 2048
LENGTHS = (600, 1, 2, 7, 8, 9, 31, 63, 129, 255, 256, 257, 300, 511, 512, 513, 1023, 1024, 1025, 1100, 1999, 2047, 2048)


@dataclass(frozen=True)
class AttentionScores(OverHeads):
    """(q, k) -> softmax(q @ k), [1, kv_heads, repeats, 1, rows]. q: [1, kv_heads, repeats, 1, head_dim].

    k: [1, kv_heads, 1, head_dim, rows], a view of rows whose values are neighbours; the rows may lie apart. More than
    MOST_ROWS of them go through MLX's own operations.
    """

    seeds: ClassVar[int] = 2 * len(LENGTHS)

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """For the longest k that the kernel takes."""
        return ((rows, self.kv_heads, self.repeats, 1, MOST_ROWS),)

    def plain(self, *inputs: Any) -> Outputs:
        q, k = inputs
        scores: mx.array = mx.softmax(q @ k, axis=-1, precise=True)
        return scores

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        draw = Draw(seed, dtype)
        length = LENGTHS[seed % len(LENGTHS)]
        # A cache has room for more rows than it hands out.
        k = draw.normal(rows, self.kv_heads, 1, length + 256 * (seed % 2), self.head_dim)[..., :length, :]
        q = draw.normal(rows, self.kv_heads, self.repeats, 1, self.head_dim, scales=(1.0, 0.2, 0.02))
        return q, k.swapaxes(-1, -2)

    def program(self, backend: str) -> Program:
        if backend != "cuda":
            raise Unsupported("the kernel of attention's scores is written for CUDA")
        if self.head_dim not in (128, 256, 512):
            raise Unsupported(f"heads of {self.head_dim}; the kernel of attention's scores is for 128, 256 and 512")
        if self.kv_heads == 1 and self.repeats > 1:
            raise Unsupported("one KV head: MLX takes the product of all query heads at once")
        return Program(
            backend,
            "attention_scores",
            headers=("cluster.h", "scores.h"),
            constants=(
                *(("HEAD_DIM", self.head_dim), ("REPEATS", self.repeats)),
                *(("CLUSTER", CLUSTER), ("THREADS", THREADS), ("TAKEN", 2048 // self.head_dim)),
            ),
            inputs=("q", "k"),
            outputs=("out",),
            arguments=("q", "k", "k_shape", "k_strides", "out"),
            threads=THREADS,
            blocks=self.heads * CLUSTER,
            shared=(("straightline::T", "scores", MOST_ROWS), ("float", "ends", 2 * THREADS // 32)),
            contiguous=False,
        )

    def launched(self, program: Program, kernel: Kernel, dtype: mx.Dtype) -> Call:
        head, dtypes, plain = (1, self.kv_heads, self.repeats, 1), (dtype,), self.plain
        grid, threads = (program.threads * program.blocks, 1, 1), (program.threads, 1, 1)

        def scores(q: mx.array, k: mx.array) -> Any:
            rows = k.shape[4]
            if rows > MOST_ROWS:
                return plain(q, k)
            shapes = ((*head, rows),)
            return kernel(inputs=(q, k), output_shapes=shapes, output_dtypes=dtypes, grid=grid, threadgroup=threads)[0]

        return scores
