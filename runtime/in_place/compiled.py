"""Layers over full rings as compiled functions: their shapes never change, and MLX builds their graph in C++."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from .slot import Clock, Slot

Compiled = Callable[..., tuple[mx.array, ...]]


class CompiledLayers:
    """One compiled function for each layer's weights, for all leases: what belongs to a lease is an argument."""

    def __init__(self, calls: SimpleNamespace) -> None:
        self._calls = calls
        self._known: dict[int, Compiled] = {}
        self._sources: set[int] = set()

    def run(self, function: Any, w: Any, _: Any, h: mx.array, x: mx.array, kv: Any, position: Any, *rest: Any) -> Any:
        """function(w, s, h, x, kv, position, *rest), of a slot whose views stay, or of the keys and values of one."""
        compiled = self._known.get(id(w))
        if compiled is None:
            # `w` lives as long as the binding that these calls belong to, and its id with it.
            compiled = self._known[id(w)] = self._compile(function, w, type(kv) is Slot, rest[1:])
        if type(kv) is not Slot:
            return compiled(h, x, position, *rest[:1], *kv)
        h, x, *made = compiled(h, x, position, *rest[:1], kv.keys, kv.values, kv.ring, kv.clock.after, kv.k, kv.v)
        return (h, x, tuple(made) or (kv.k, kv.v)) if id(w) in self._sources else (h, x)

    def _compile(self, function: Any, w: Any, owns: bool, index: tuple[int, ...]) -> Compiled:
        calls = self._calls

        def reader(h: mx.array, x: mx.array, position: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
            *per_layer, k, v = rest
            results: tuple[mx.array, ...] = function(w, calls, h, x, (k, v), position, *per_layer, *index)
            return results

        def owner(h: mx.array, x: mx.array, position: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
            *per_layer, keys, values, ring, after, k, v = rest
            slot = SimpleNamespace(keys=keys, values=values, ring=ring, clock=Clock(after, 0), k=k, v=v)
            h, x, *source = function(w, calls, h, x, slot, position, *per_layer, *index)
            if not source:
                return h, x
            self._sources.add(id(w))
            (seen,) = source
            return (h, x) if seen[0] is k else (h, x, *seen)

        compiled: Compiled = mx.compile(owner if owns else reader)
        return compiled
