"""Random inputs of a self-check: the same for the same seed, in the sizes of the site."""

from collections.abc import Sequence

import mlx.core as mx

POSITIONS = (0, 1, 17, 599, 1100, 5003, 32767, 131071)


class Draw:
    """A stream of random arrays of one dtype."""

    def __init__(self, seed: int, dtype: mx.Dtype) -> None:
        self.seed = seed
        self.dtype = dtype
        self._key = mx.random.key(seed)

    def key(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def normal(self, *shape: int, scales: Sequence[float] = (1.0,)) -> mx.array:
        """Normal values times one of the scales, which take turns with the seed."""
        return (mx.random.normal(shape, key=self.key()) * scales[self.seed % len(scales)]).astype(self.dtype)

    def norm(self, size: int) -> mx.array:
        """An RMSNorm weight. Ones would hide how the product is rounded."""
        return (1 + 0.4 * mx.random.normal((size,), key=self.key())).astype(self.dtype)

    def scalar(self) -> mx.array:
        return mx.random.uniform(0.05, 1.2, (1,), key=self.key()).astype(self.dtype)

    def position(self, rows: int) -> mx.array:
        """int32: a scalar for one row, as `mx.array(cache.offset)` of a KVCache; else one for each row."""
        picked = [POSITIONS[(self.seed + row) % len(POSITIONS)] for row in range(rows)]
        return mx.array(picked[0] if rows == 1 else picked, dtype=mx.int32)

    def finite(self, *shape: int) -> mx.array:
        """bfloat16: any finite bit pattern, each as likely. Another dtype: normal values."""
        if self.dtype != mx.bfloat16:
            return self.normal(*shape, scales=(4.0,))
        magnitude = mx.random.randint(0, 0x7F80, shape, key=self.key())
        sign = mx.random.randint(0, 2, shape, key=self.key()) * 0x8000
        return (magnitude + sign).astype(mx.uint16).view(mx.bfloat16)

    def packed(self, rows: int, words: int) -> mx.array:
        """uint32 [rows, words]: quantized weights, every bit random. Large ones are 16 parts that differ by a mask."""
        parts = 16 if rows % 16 == 0 and rows * words > 1 << 20 else 1
        masks = self._words(parts, 1, 1) if parts > 1 else mx.zeros((1, 1, 1), dtype=mx.uint32)
        return mx.bitwise_xor(self._words(1, rows // parts, words), masks).reshape(rows, words)

    def quantized(self, rows: int, size: int, bits: int, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
        """Affine weights, scales and biases: a standard deviation about size**-0.5, a mean near 0, as trained ones."""
        groups, step = (rows, size // group_size), size**-0.5 * 4 / 2**bits
        packed = self.packed(rows, size * bits // 32)
        scales = (mx.random.uniform(0.5, 1.5, groups, key=self.key()) * step).astype(self.dtype)
        biases = ((mx.random.normal(groups, key=self.key()) * 0.05 - 0.5) * step * 2**bits).astype(self.dtype)
        return packed, scales, biases

    def _words(self, *shape: int) -> mx.array:
        """Byte by byte, because randint goes through float32."""
        *outer, last = shape
        return mx.random.randint(0, 256, (*outer, 4 * last), key=self.key()).astype(mx.uint8).view(mx.uint32)
