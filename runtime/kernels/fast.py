"""The fast tier's attention of one token: float32 inside, closer to float64 than MLX's operations, not their bits."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx

from ..ops import quantized_attention
from .draw import Draw
from .heads import OverHeads
from .program import Program, Unsupported
from .site import Outputs

LENGTHS = (1, 2, 17, 63, 300, 512, 600, 1024, 1100, 2049, 3000, 32768)
CLUSTER = 8  # blocks of a cluster, the most that every device with clusters has
MOST_PARTS = 128
MERGED = 128  # values of a head that a block of the second kernel adds up
MERGERS = 4


@dataclass(frozen=True)
class Cut:
    """How the work is cut: query heads a block, threads a block, rows that a warp takes at a time.

    ahead: the next rows are on their way while these are worked on.
    """

    heads: int
    threads: int
    rows: int
    ahead: bool = False


@dataclass(frozen=True)
class FastAttention(OverHeads):
    """(q, k, v) or, with `whole`, (q, k, v, rows) -> [1, 1, heads * head_dim]. q: [1, heads, 1, head_dim].

    k, v: [1, kv_heads, rows, head_dim]; or for bits > 0 each (packed, scales, biases), as a quantized cache gives them.
    Rows may lie apart (slices of a cache), values within a row may not. whole: k and v are whole buffers, `rows` an
    int32 scalar on the device says how many of their first rows count (more than there are: all); nothing else changes
    from token to token.
    """

    bits: int = 0
    group_size: int = 0
    whole: bool = False

    seeds: ClassVar[int] = len(LENGTHS)

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1, self.unit),)

    def plain(self, *inputs: Any) -> Outputs:
        q, k, v, *rows = inputs
        first = k[0] if self.bits else k
        mask = mx.arange(first.shape[2]) < rows[0] if rows else None
        if self.bits:
            y = quantized_attention(q, k, v, scale=1.0, mask=mask, group_size=self.group_size, bits=self.bits)
        else:
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
        flat: mx.array = y.reshape(1, 1, self.unit)
        return flat

    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        return self.inputs_of(LENGTHS[seed % len(LENGTHS)], seed, dtype)

    def inputs_of(self, length: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        """`length` rows of a buffer with room for more."""
        draw = Draw(seed, dtype)
        rows = length + 256 * (seed % 2) + 8 * self.whole
        q = draw.normal(1, self.heads, 1, self.head_dim, scales=(1.0, 0.2))
        if seed % 3 == 2:  # token by token, as rings may lie
            drawn = (draw.normal(1, rows, self.kv_heads, self.head_dim).swapaxes(1, 2) for _ in range(2))
        else:
            drawn = (draw.normal(1, self.kv_heads, rows, self.head_dim) for _ in range(2))
        k, v = (self._stored(one, length) for one in drawn)
        return (q, k, v, mx.array(length, dtype=mx.int32)) if self.whole else (q, k, v)

    def _stored(self, values: mx.array, length: int) -> Any:
        parts = mx.quantize(values, self.group_size, self.bits) if self.bits else (values,)
        seen = tuple(part if self.whole else part[..., :length, :] for part in parts)
        return seen if self.bits else seen[0]

    @property
    def cut(self) -> Cut:
        """For one launch, whose blocks are few: enough of them first. tests/gpu/fast_attention.py tries others."""
        heads = next(
            count
            for count in (4, 2, 1)
            if count == 1 or (not self.repeats % count and self.heads * CLUSTER >= 64 * count)
        )
        return Cut(heads, 256, 4 if heads * self.head_dim <= 1024 else 2)

    @property
    def long_cut(self) -> Cut:
        """For two launches, with blocks enough: each row for as many heads as it can be read for at once."""
        heads = next(count for count in (4, 2, 1) if not self.repeats % count)
        return Cut(heads, 256, 4 if heads * self.head_dim <= 1024 else 2)

    def program(self, backend: str) -> Program:
        return self.in_cluster(backend, self.cut)

    def in_cluster(self, backend: str, cut: Cut) -> Program:
        """One kernel; the blocks that share the rows of a head are one cluster."""
        return self._reading(backend, cut, ("cluster.h", "fast_cluster.h"), ("out",), (("CLUSTER", CLUSTER),))

    def in_parts(self, backend: str, cut: Cut) -> tuple[Program, Program]:
        """Two kernels: any number of blocks share the rows of a head, the second kernel adds up what they leave."""
        return self._reading(backend, cut, ("fast_parts.h",), ("parts", "scores"), ()), Program(
            backend,
            "fast_merge",
            headers=("fast_merge.h",),
            constants=(("HEAD_DIM", self.head_dim), ("MERGED", MERGED), ("MERGERS", MERGERS)),
            inputs=("parts", "scores"),
            outputs=("out",),
            arguments=("parts", "scores", "parts_shape", "out"),
            threads=MERGED * MERGERS,
            blocks=self.head_dim // MERGED,
            shared=(("float", "shared", 2 * MERGED * MERGERS),),
        )

    def in_tensors(self, backend: str) -> tuple[Program, Program]:
        """As `in_parts`, by products of matrices."""
        reading, adding = self.in_parts(backend, Cut(1, 256, 1))
        if self.bits or self.head_dim != 512 or self.repeats > 16:
            raise Unsupported("tensor products are for plain rows of 512 and up to 16 query heads a KV head")
        warps = reading.threads // 32
        return (
            replace(
                reading,
                function="fast_tensor",
                headers=(*reading.headers[:-1], "fast_tensor.h"),
                lines=self.kv_heads,
                shared=(
                    ("straightline::Four", "queries", 2 * self.head_dim // 32 * 32),
                    ("float", "table", 16 * 72),
                    ("float", "shrunk", 2 * warps),
                ),
            ),
            adding,
        )

    def for_many_rows(self, backend: str) -> tuple[tuple[Program, Program], ...]:
        """What to try in two launches, the one that is thought to be faster first; see docs/fast-tier.md."""
        parts = self.in_parts(backend, self.long_cut)
        tensors = not self.bits and self.head_dim == 512 and 8 <= self.repeats <= 16
        return (self.in_tensors(backend), parts) if tensors else (parts,)

    def _constants(self, cut: Cut) -> tuple[tuple[str, int | float], ...]:
        return (
            *(("HEAD_DIM", self.head_dim), ("REPEATS", self.repeats), ("GROUP", cut.heads), ("TAKEN", cut.rows)),
            *(("BLOCK", cut.threads), ("AHEAD", cut.ahead)),
            *((("BITS", self.bits), ("GROUP_SIZE", self.group_size)) if self.bits else ()),
        )

    def _reading(
        self,
        backend: str,
        cut: Cut,
        ending: tuple[str, ...],
        outputs: tuple[str, ...],
        more: tuple[tuple[str, int], ...],
    ) -> Program:
        if backend != "cuda":
            raise Unsupported("the fast attention is written for CUDA")
        if self.head_dim not in (256, 512):
            raise Unsupported(f"heads of {self.head_dim}; the fast attention is for 256 and 512")
        if self.heads % self.kv_heads:
            raise Unsupported(f"{self.heads} query heads over {self.kv_heads} KV heads; expected a multiple")
        stored = [[f"{name}{part}" for part in "wsb"] if self.bits else [name] for name in "kv"]
        rows = [
            f"straightline::Rows({', '.join([*names, *(f'{name}_strides' for name in names)])})" for names in stored
        ]
        first = stored[0][0]
        warps = cut.threads // 32
        return Program(
            backend,
            "fast_attention",
            headers=("fast_base.h", "fast_packed.h" if self.bits else "fast_plain.h", *ending, "fast_attention.h"),
            constants=(*self._constants(cut), *more),
            inputs=("q", *stored[0], *stored[1], *(("rows",) if self.whole else ())),
            outputs=outputs,
            arguments=(
                "q",
                *rows,
                f"min(rows[0], {first}_shape[2])" if self.whole else f"{first}_shape[2]",
                f"straightline::Out{{{', '.join(outputs)}}}",
            ),
            threads=cut.threads,
            blocks=CLUSTER,
            lines=self.heads // cut.heads,
            shared=(
                ("float", "spare", warps // 2 * cut.heads * self.head_dim),
                ("float", "stats", 2 * warps * cut.heads),
                ("float", "ends", 2 * cut.heads),
            ),
            contiguous=False,
        )
