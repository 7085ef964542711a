"""Borrowed caches: of their own class but for what they hold, which is elsewhere until somebody asks for it.

An interrupt may come between any two steps of lending and giving back: at each, one of the two has all that is held.
"""

import copy
from typing import Any, ClassVar


class Borrowed:
    """Comes before the class of a cache. Whoever sets anything owns it.

    elsewhere: attributes that the cache does not have meanwhile, each named by `asked_for` or a property of its own.
    where: those that it has instead. While the first of them is there, what they lead to counts, and nothing that the
    cache itself has under a name of `elsewhere`; once it is gone, that is what counts.
    """

    elsewhere: ClassVar[tuple[str, ...]]
    where: ClassVar[tuple[str, ...]]

    def restored(self) -> dict[str, Any]:
        """What `elsewhere` names, as the cache has it from now on."""
        raise NotImplementedError

    def give_back(self) -> Any:
        """The cache, of its own class alone, with all that it holds."""
        held = vars(self)
        if self.where[0] in held:
            held.update(self.restored())
        for name in self.where:
            held.pop(name, None)
        object.__setattr__(self, "__class__", type(self).__bases__[-1])
        return self

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


def borrow(cache: Any, front: type[Borrowed], where: dict[str, Any]) -> None:
    """From now on what `front.elsewhere` names is there."""
    kind, held = type(cache), vars(cache)
    if (front, kind) not in _classes:
        # Named as the class it stands for, which is what saved prompt caches are read back by.
        _classes[front, kind] = type(kind.__name__, (front, kind), {"__module__": kind.__module__})
    cache.__class__ = _classes[front, kind]
    held.update(where)
    for name in front.elsewhere:
        held.pop(name, None)


def give_all_back(caches: Any) -> bool:
    """Each cache of a list is its own again; whether any was not."""
    lent = [cache for cache in caches if isinstance(cache, Borrowed)] if isinstance(caches, (list, tuple)) else []
    for cache in lent:
        cache.give_back()
    return bool(lent)


_classes: dict[tuple[type, type], type] = {}
