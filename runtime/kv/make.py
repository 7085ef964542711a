"""make_cache: the caches of a model, from its architecture and a kv_config."""

from typing import Any

from ...codegen.config import read_arguments
from ...codegen.errors import SpecError
from ...codegen.kv import read_kv_config
from ...codegen.spec import Attention, Quantized, Spec
from ..errors import StraightlineError
from .growing import GrowingKVCache, KVCache
from .ours import quantizable
from .quantized import QuantizedGrowingCache, QuantizedRingCache, QuantizedRollbackCache
from .ring import RotatingKVCache
from .rollback import DEPTH, SlidingRollbackCache
from .sharing import SharedCache

MOST_DEPTH = 4096


def make_cache(
    model: Any,
    kv_config: list[dict[str, int]] | None = None,
    rollback: bool = False,
    *,
    depth: int = DEPTH,
    every_layer: bool = False,
) -> list[Any]:
    """The cache list to pass to a model: one for each layer that owns keys and values.

    model: a loaded mlx-lm Gemma 4 model, specialized or not.
    kv_config: a parsed kv_config.json, `[{"layer_idx": 3, "bits": 8, "group_size": 64}, ...]`. Layers that are left
        out, and layers of 0 bits, store keys and values as they are. None: what the model was loaded with, else plain.
    rollback: every cache takes back up to `depth` tokens behind the furthest one it has seen, at any time and exactly
        (`trim(n)`, or mlx-lm's trim_prompt_cache). Costs 2 * depth - 1 rows more in each sliding layer.
    every_layer: stand-ins for the layers that share as well. mlx-lm's speculative decoding takes the target's and the
        draft's caches in one list and splits it at the number of the target's layers.

    Raises StraightlineError for a kv_config that does not fit the model, saying where, what, and what instead.
    """
    if type(rollback) is not bool:
        raise StraightlineError(f"make_cache: rollback is {rollback!r}; expected True or False")
    if type(depth) is not int or not 1 <= depth <= MOST_DEPTH:
        raise StraightlineError(f"make_cache: depth is {depth!r}; expected an integer from 1 to {MOST_DEPTH}")
    if depth != DEPTH and not rollback:
        raise StraightlineError(f"make_cache: depth is {depth}, but rollback is False; expected rollback=True with it")
    if not hasattr(model, "make_cache"):
        raise StraightlineError(f"make_cache: model is a {type(model).__name__}; expected an mlx-lm Gemma 4 model")
    caches = _make_cache(model, kv_config, depth if rollback else 0)
    return caches + [SharedCache() for _ in range(len(model.layers) - len(caches))] if every_layer else caches


def _make_cache(model: Any, kv_config: list[dict[str, int]] | None, depth: int) -> list[Any]:
    """A depth of 0 is no rollback."""
    if kv_config is None and not depth:
        return quantizable(model.make_cache())
    own = getattr(model, "_storage", None)  # what the model was loaded with
    if kv_config is None and own is not None:
        return caches_of(own[0], depth)
    try:
        spec = read_arguments(model.get("language_model", model).args)
        storage = read_kv_config(kv_config, spec, "kv_config")
    except SpecError as error:
        raise StraightlineError(f"make_cache: {error}") from None
    return caches_of(spec.with_kv(storage), depth)


def caches_of(spec: Spec, depth: int = 0) -> list[Any]:
    """The caches of an architecture that stores K/V as `spec.kv` says; a depth of 0 is no rollback."""
    return [_one(spec, layer, spec.kv_of(layer), depth) for layer in spec.owners]


def caches_for(expected: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Empty caches as a generated file's CACHES say."""
    made: list[Any] = []
    for kind, window, *stored in expected:
        ring = kind == "sliding"
        if stored:
            bits, group_size = stored
            made.append(
                QuantizedRingCache(bits, group_size, window) if ring else QuantizedGrowingCache(bits, group_size)
            )
        else:
            made.append(RotatingKVCache(window) if ring else KVCache())
    return made


def _one(spec: Spec, layer: int, kv: Quantized | None, depth: int) -> Any:
    """The cache of one layer."""
    window = spec.sliding_window
    if spec.layers[layer].attention is Attention.FULL:
        if kv is not None:
            return QuantizedGrowingCache(kv.bits, kv.group_size)
        return GrowingKVCache() if depth else KVCache()
    if kv is not None:
        if depth:
            return QuantizedRollbackCache(kv.bits, kv.group_size, window, depth)
        return QuantizedRingCache(kv.bits, kv.group_size, window)
    return SlidingRollbackCache(window, depth) if depth else RotatingKVCache(window)
