"""KV sharing with packed rows on mlx-lm's own forward, which takes a sharing layer without a cache for plain.

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


class SharedCache:
    """In the place of a cache that a sharing layer does not have, for callers that count one for each layer.

    Holds nothing, and takes back as many tokens as it is asked to.
    """

    state: tuple[()] = ()
    nbytes = 0

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        return n

    def empty(self) -> bool:
        return True


def owned(caches: list[Any], owners: int) -> list[Any]:
    """The caches of the layers that own keys and values, if all others in the list are SharedCache."""
    return caches[:owners] if all(type(one) is SharedCache for one in caches[owners:]) else caches


def with_stand_ins(caches: Any, sources: list[int]) -> Any:
    """The caches, one for each layer if some hand out packed rows and some layers share; unchanged otherwise.

    sources: for each layer, the layer whose keys and values it reads (mlx-lm's `previous_kvs`).
    """
    if isinstance(caches, list):
        caches = owned(caches, sum(source == layer for layer, source in enumerate(sources)))
    if not isinstance(caches, list) or len(caches) >= len(sources) or not any(hasattr(one, "bits") for one in caches):
        return caches
    readers = sources[len(caches) :]
    return caches + [
        SourceFormat(caches[source]) if source < len(caches) and hasattr(caches[source], "bits") else None
        for source in readers
    ]
