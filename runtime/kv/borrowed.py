"""Borrowed caches: of their own class but for what they hold, which is elsewhere until somebody asks for it."""

import copy
from typing import Any


class Borrowed:
    """Comes before the class of a cache, and names what is elsewhere by `asked_for`. Whoever sets anything owns it."""

    def give_back(self) -> Any:
        """The cache, of its own class alone, with all that it holds."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.give_back(), name, value)

    def __copy__(self) -> Any:
        return copy.copy(self.give_back())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.give_back(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.give_back().__reduce_ex__(protocol)


def asked_for(name: str) -> property:
    """An attribute that is the cache's own again once somebody reads it."""
    return property(lambda cache: getattr(cache.give_back(), name))


def borrow(cache: Any, front: type[Borrowed]) -> None:
    kind = type(cache)
    if (front, kind) not in _classes:
        # Named as the class it stands for, which is what saved prompt caches are read back by.
        _classes[front, kind] = type(kind.__name__, (front, kind), {"__module__": kind.__module__})
    cache.__class__ = _classes[front, kind]


def give_all_back(caches: Any) -> bool:
    """Each cache of a list is its own again; whether any was not."""
    lent = [cache for cache in caches if isinstance(cache, Borrowed)] if isinstance(caches, (list, tuple)) else []
    for cache in lent:
        cache.give_back()
    return bool(lent)


def give_back(cache: Any) -> None:
    """The class as it was. What the cache holds is the caller's to restore."""
    object.__setattr__(cache, "__class__", type(cache).__bases__[-1])


_classes: dict[tuple[type, type], type] = {}
