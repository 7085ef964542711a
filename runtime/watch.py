"""A module tree that counts its changes, so that a bound forward knows in one comparison whether it is stale.

LoRA adapters, reloaded weights and quantization all change an `nn.Module`, which is a dict, through its item methods.
Watching gives each module of the tree a subclass of its own class that counts those calls. Nothing else about a
module differs: same name, same behaviour, `isinstance` still true.
"""

from collections.abc import Iterator
from functools import cache
from threading import RLock
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_changes = 0
counting = RLock()  # taken again by a finalizer that changes a module meanwhile


def changes() -> int:
    """The number of the latest change of any watched module in this process."""
    return _changes


def changed_since(root: nn.Module, number: int) -> bool:
    """Whether a later change than this one was of the tree below `root`."""
    return any(vars(one).get("_changed", 0) > number for one in _counting(root))


def _counted(name: str, base: type, method: Any = None) -> Any:
    method = method or getattr(base, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _changes
        try:
            return method(self, *args, **kwargs)
        finally:
            # Counted when it is done: a forward in another thread that binds before that will bind again.
            with counting:
                # The module's number first: whoever finds a new count finds whose it is.
                self.__dict__["_changed"] = _changes + 1
                _changes += 1

    return counted


def _assigned(self: Any, key: Any, value: Any) -> None:
    """An array that is assigned to where it is already was edited in place: nothing else tells."""
    if isinstance(value, mx.array) and dict.get(self, key) is value:
        self.__dict__["_edited"] = _changes
    dict.__setitem__(self, key, value)


def _made(kind: Any) -> Any:
    return kind.__new__(kind)


def edited(module: Any) -> int | None:
    """Changes when an array of a watched module is assigned again after an edit in place."""
    found: int | None = getattr(module, "__dict__", {}).get("_edited")
    return found


class Watched:
    """Mixin of the classes that `watch` gives to modules."""

    __setitem__ = _counted("__setitem__", dict, _assigned)
    __delitem__ = _counted("__delitem__", dict)
    pop = _counted("pop", dict)
    popitem = _counted("popitem", dict)
    clear = _counted("clear", dict)
    setdefault = _counted("setdefault", dict)
    __ior__ = _counted("__ior__", dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the plain class, which can be found by its name."""
        # Below 2 the items of a dict go another way, which would be lost here; arrays have no such protocol anyway.
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, _, state, *items = reduced
        return (_made, (plain_class(self),), _uncounted(state), *items)


class WatchedList(list[Any]):
    """A list of a module (`layers`) that counts its changes too."""

    __setitem__ = _counted("__setitem__", list)
    __delitem__ = _counted("__delitem__", list)
    __iadd__ = _counted("__iadd__", list)
    __imul__ = _counted("__imul__", list)
    append = _counted("append", list)
    extend = _counted("extend", list)
    insert = _counted("insert", list)
    pop = _counted("pop", list)
    remove = _counted("remove", list)
    clear = _counted("clear", list)
    reverse = _counted("reverse", list)
    sort = _counted("sort", list)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain lists."""
        return list, (), None, iter(self)


def _uncounted(state: dict[str, Any]) -> dict[str, Any]:
    """Without its number, which says nothing in another process."""
    return {key: value for key, value in state.items() if key != "_changed"}


@cache
def _watched_class(base: Any) -> type:
    return type(base.__name__, (Watched, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def plain_class(module: object) -> type:
    """The class that a module had before it was watched."""
    kind = type(module)
    return kind.__mro__[2] if kind.__bases__[:1] == (Watched,) else kind


def watch(root: nn.Module) -> None:
    """Watch every module below `root` (and not yet watched), and their lists."""
    for module in list(_below(root)):
        kind: Any = type(module)
        if Watched not in kind.__mro__:
            module.__class__ = _watched_class(kind)
        for key, value in module.items():
            if type(value) is list:
                dict.__setitem__(module, key, WatchedList(value))


def _counting(root: nn.Module) -> Iterator[Any]:
    """Every watched module of the tree and every watched list."""
    for module in _below(root):
        yield module
        yield from (value for value in module.values() if type(value) is WatchedList)


def _below(module: Any) -> Iterator[nn.Module]:
    """Every module in the tree, `module` first, whatever key it is kept under."""
    if isinstance(module, nn.Module):
        yield module
    if isinstance(module, dict):
        children: Any = module.values()
    elif isinstance(module, (list, tuple)):
        children = module
    else:
        return
    for child in children:
        yield from _below(child)
