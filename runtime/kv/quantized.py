"""Quantized caches: three plain caches of one layout, for the packed numbers, the scales and the biases.

Tokens kept, their order, masks, growth, rollback and batching are therefore those of the plain layout, by its own code.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, _BaseCache

from ...codegen.kv import BITS, GROUP_SIZES
from ...codegen.spec import Quantized
from ..errors import OtherLayout, StraightlineError
from .device import PLAIN_ROWS, packing
from .growing import GrowingKVCache, fresh
from .ring import RotatingKVCache
from .rollback import SlidingRollbackCache

Rows = tuple[mx.array, mx.array, mx.array]


class _Quantized(_BaseCache):  # type: ignore[misc]
    """What all of them do. stored: how its rows are packed.

    mlx-lm's attention takes rows for packed if the cache has `bits` and `group_size`. So these are there where rows are
    handed out packed, and not where they are handed out plain (device.py says why).
    """

    layout: ClassVar[Any]

    def __init__(self, bits: int, group_size: int, parts: list[Any]) -> None:
        name = type(self).__name__
        if bits not in BITS:
            raise StraightlineError(
                f"{name}: bits is {bits!r}; expected {', '.join(map(str, BITS[:-1]))} or {BITS[-1]}"
            )
        if group_size not in GROUP_SIZES:
            raise StraightlineError(f"{name}: group_size is {group_size!r}; expected 32, 64 or 128")
        self.stored = Quantized(bits, group_size)
        if not PLAIN_ROWS:
            self.bits, self.group_size = bits, group_size
        self.parts = parts

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [B, heads, L, dim]; keys and values as what `mx.quantized_matmul` takes: packed, scales, biases.

        packed is uint32 [B, heads, rows, dim * bits / 32], scales and biases [B, heads, rows, dim / group_size].
        On CUDA the rows themselves, [B, heads, rows, dim].
        """
        k, v = self.update_packed(keys, values)
        return (self._plain(*k), self._plain(*v)) if PLAIN_ROWS else (k, v)

    def update_packed(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        """The same; all rows as they are stored, on any device."""
        bits, group_size = self.stored.bits, self.stored.group_size
        k = mx.quantize(keys, group_size, bits)
        v = mx.quantize(values, group_size, bits)
        packed, scales, biases = self.parts
        k0, v0 = packed.update_and_fetch(k[0], v[0])
        k1, v1 = scales.update_and_fetch(k[1], v[1])
        k2, v2 = biases.update_and_fetch(k[2], v[2])
        return (k0, k1, k2), (v0, v1, v2)

    def keys_and_values(self) -> tuple[Any, Any]:
        """All rows, handed out as by update_and_fetch."""
        keys, values = zip(*(part.keys_and_values() for part in self.parts), strict=True)
        return (self._plain(*keys), self._plain(*values)) if PLAIN_ROWS else (keys, values)

    def _plain(self, packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(packed, scales, biases, self.stored.group_size, self.stored.bits)

    def _not_plain(self) -> NoReturn:
        raise OtherLayout(f"a {type(self).__name__} cannot join a plain batch: make all caches with the same kv_config")

    # What mlx-lm's plain caches ask of those that they are to be merged with, or extended by.
    keys = rotated = _idx = property(_not_plain)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts[0].make_mask(*args, **kwargs)

    @property
    def offset(self) -> Any:
        return self.parts[0].offset

    @property
    def state(self) -> tuple[int, int, list[Any]]:
        """bits, group_size, and the state of each part."""
        return self.stored.bits, self.stored.group_size, [part.state for part in self.parts]

    @state.setter
    def state(self, state: Any) -> None:
        bits, group_size, parts = state
        _Quantized.__init__(self, bits, group_size, [self.layout.from_state(list(map(fresh, part))) for part in parts])

    def is_trimmable(self) -> bool:
        return bool(self.parts[0].is_trimmable())

    def trim(self, n: int) -> int:
        """As the layout's; if it raises, nothing has changed."""
        for part in self.parts:
            n = part.trim(n)
        return n

    def size(self) -> int:
        return int(self.parts[0].size())

    def empty(self) -> bool:
        return bool(self.parts[0].empty())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __copy__(self) -> Any:
        return type(self).from_state(self.state)


class _Solo(_Quantized):
    """One sequence. `batch`: the class that several of them merge into."""

    batch: ClassVar[Any]

    @classmethod
    def of(cls, plain: Any, *, bits: int, group_size: int) -> Any:
        """A plain cache of the same layout, packed: the same tokens in the same slots."""
        keys = _quantize(plain.keys, bits, group_size)
        values = _quantize(plain.values, bits, group_size)
        parts = []
        for index in range(3):
            part = cls.layout.__new__(cls.layout)
            part.__dict__.update(plain.__dict__, keys=keys[index], values=values[index])
            parts.append(part)
        cache = cls.__new__(cls)
        _Quantized.__init__(cache, bits, group_size, parts)
        return cache

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        """One batch with left padding. Raises StraightlineError if they differ in bits or group size."""
        first = caches[0]
        for cache in caches:
            _expect_same(first, cache, cls)
        batch = cls.batch
        return batch(
            first.stored.bits,
            first.stored.group_size,
            [batch.layout.merge([cache.parts[index] for cache in caches]) for index in range(3)],
        )


class QuantizedGrowingCache(_Solo):
    """Every token, packed; takes any number of tokens back. For layers with full attention."""

    layout = GrowingKVCache

    def __init__(self, bits: int, group_size: int) -> None:
        super().__init__(bits, group_size, [GrowingKVCache() for _ in range(3)])


class QuantizedRingCache(_Solo):
    """The last `max_size` tokens, packed, laid out as mlx-lm's RotatingKVCache lays them out."""

    layout = RotatingKVCache

    def __init__(self, bits: int, group_size: int, max_size: int) -> None:
        super().__init__(bits, group_size, [RotatingKVCache(max_size) for _ in range(3)])

    @property
    def max_size(self) -> int:
        return int(self.parts[0].max_size)


class QuantizedRollbackCache(_Solo):
    """The last tokens, packed, laid out as SlidingRollbackCache lays them out; takes tokens back, exactly."""

    layout = SlidingRollbackCache

    def __init__(self, bits: int, group_size: int, window: int, depth: int) -> None:
        super().__init__(bits, group_size, [SlidingRollbackCache(window, depth) for _ in range(3)])

    @property
    def window(self) -> int:
        return int(self.parts[0].window)

    @property
    def depth(self) -> int:
        return int(self.parts[0].depth)

    @classmethod
    def merge(cls, caches: list[Any]) -> NoReturn:
        raise OtherLayout(
            f"{cls.__name__} cannot be batched, since each row would roll back by itself; "
            "use make_cache(model, kv_config) without rollback for batches"
        )

    # What mlx-lm's ring asks of those that it is to be merged with.
    max_size = property(lambda cache: cache.merge([cache]))


class _Batch(_Quantized):
    """Several sequences, padded on the left, as mlx-lm's batch caches hold them. `solo`: the class of one row."""

    solo: ClassVar[Any]

    @property
    def state(self) -> tuple[int, int, list[Any]]:
        return super().state

    @state.setter
    def state(self, state: Any) -> None:
        _Quantized.state.__set__(self, state)  # type: ignore[attr-defined]
        for part in self.parts:
            # mlx-lm's own from_state leaves these two unset, and the next prompt would fail on them.
            part.__dict__.setdefault("_right_padding", None)
            part.__dict__.setdefault("_lengths", None)

    def prepare(self, **kwargs: Any) -> None:
        self._each(lambda part: part.prepare(**kwargs))

    def finalize(self) -> None:
        self._each(lambda part: part.finalize())

    def filter(self, batch_indices: Any) -> None:
        self._each(lambda part: part.filter(batch_indices))

    def extend(self, other: Any) -> None:
        """Append the rows of another batch. Raises StraightlineError if it differs in bits or group size."""
        _expect_same(self, other, type(self))
        for part, more in zip(self.parts, other.parts, strict=True):
            part.extend(more)

    def extract(self, idx: int) -> Any:
        """Row `idx` as a cache of one sequence."""
        rows = [part.extract(idx).state for part in self.parts]
        return self.solo.from_state((self.stored.bits, self.stored.group_size, rows))

    def _each(self, act: Callable[[Any], None]) -> None:
        for part in self.parts:
            act(part)


class BatchQuantizedGrowingCache(_Batch):
    layout = BatchKVCache
    solo = QuantizedGrowingCache


class BatchQuantizedRingCache(_Batch):
    layout = BatchRotatingKVCache
    solo = QuantizedRingCache

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        """As mlx-lm's ring, whose mask for several tokens counts on rows in order of time.

        mlx-lm brings them into it only afterwards, in the update. So once a ring has wrapped, its mask hides tokens of
        a row that has fewer of them than the window.
        """
        if N > 1:
            self._each(lambda part: part._temporal_order())
        return super().make_mask(N, *args, **kwargs)


QuantizedGrowingCache.batch = BatchQuantizedGrowingCache
QuantizedRingCache.batch = BatchQuantizedRingCache


def _quantize(rows: mx.array | None, bits: int, group_size: int) -> tuple[Any, ...]:
    return (None, None, None) if rows is None else tuple(mx.quantize(rows, group_size, bits))


def _expect_same(first: Any, other: Any, expected: type) -> None:
    found: Any = type(other)
    bits, group_size = packing(other)
    if found is not expected or other.stored != first.stored:
        packed = f" of {bits} bits in groups of {group_size}" if bits else ""
        raise StraightlineError(
            f"a batch of {expected.__name__} cannot hold a {found.__name__}{packed}; expected {first.stored.bits} bits "
            f"in groups of {first.stored.group_size} in every row: make all caches with the same kv_config"
        )
