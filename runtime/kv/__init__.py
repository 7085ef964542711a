"""KV caches beyond mlx-lm's: quantized with bits of their own per layer, sliding rings included, and exact rollback.

| class | layout | why |
|---|---|---|
| RotatingKVCache | mlx-lm's ring | bit-equal to mlx-lm; can be quantized |
| KVCache | slot = position | bit-equal to mlx-lm; can be quantized |
| GrowingKVCache | slot = position | taking tokens back is exact as it is |
| SlidingRollbackCache | slot = position mod capacity | a row's place does not depend on what was taken back |
| Quantized...Cache | three plain caches of the same layout | one implementation of every behaviour |

Importing this makes them known to mlx-lm's load_prompt_cache.
"""

from .files import load_cache, save_cache
from .growing import GrowingKVCache, KVCache
from .make import make_cache
from .ours import quantizable
from .quantized import (
    BatchQuantizedGrowingCache,
    BatchQuantizedRingCache,
    QuantizedGrowingCache,
    QuantizedRingCache,
    QuantizedRollbackCache,
)
from .registered import register
from .ring import RotatingKVCache
from .rollback import DEPTH, SlidingRollbackCache
from .sharing import with_stand_ins

# Not KVCache and RotatingKVCache: their names are mlx-lm's, and so are the classes that saved ones load as.
register(
    GrowingKVCache,
    SlidingRollbackCache,
    QuantizedGrowingCache,
    QuantizedRingCache,
    QuantizedRollbackCache,
    BatchQuantizedGrowingCache,
    BatchQuantizedRingCache,
)

__all__ = [
    "DEPTH",
    "BatchQuantizedGrowingCache",
    "BatchQuantizedRingCache",
    "GrowingKVCache",
    "KVCache",
    "QuantizedGrowingCache",
    "QuantizedRingCache",
    "QuantizedRollbackCache",
    "RotatingKVCache",
    "SlidingRollbackCache",
    "load_cache",
    "make_cache",
    "quantizable",
    "save_cache",
    "with_stand_ins",
]
