"""KV sharing with quantized caches on mlx-lm's own forward, which takes a sharing layer without a cache for plain.

A sharing layer gets a stand-in that says the bits of its source and hands back what it is given. mlx-lm stays as it is.
"""

from typing import Any


class SourceFormat:
    """In the place of a sharing layer's cache: what the rows of its source are packed as."""

    def __init__(self, source: Any) -> None:
        self.bits = source.bits
        self.group_size = source.group_size

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values


def with_stand_ins(caches: Any, sources: list[int]) -> Any:
    """The caches, one for each layer if some are quantized and some layers share; unchanged otherwise.

    sources: for each layer, the layer whose keys and values it reads (mlx-lm's `previous_kvs`).
    """
    if not isinstance(caches, list) or len(caches) >= len(sources) or not any(hasattr(one, "bits") for one in caches):
        return caches
    readers = sources[len(caches) :]
    return caches + [
        SourceFormat(caches[source]) if source < len(caches) and hasattr(caches[source], "bits") else None
        for source in readers
    ]
