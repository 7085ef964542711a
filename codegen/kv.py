"""kv_config.json (a JSON array of layer, bits, group) to one entry for each layer that owns a cache. Raises SpecError.

Codegen bakes the result into a file and the runtime makes caches from it, so both refuse the same things in the same
words. Imports no MLX.
"""

from typing import Any

from .errors import SpecError, listing, show
from .fields import Fields
from .spec import Attention, Quantized, Spec

KEYS = ("layer_idx", "bits", "group_size")
BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)


def read_kv_config(entries: object, spec: Spec, where: str = "kv_config.json") -> tuple[Quantized | None, ...]:
    """One entry for each of `spec.owners`, in their order; None stores K/V as they are.

    entries: a parsed kv_config.json, `[{"layer_idx": 3, "bits": 8, "group_size": 64}, ...]`, or None for all plain.
    Layers left out and layers of 0 bits are plain.
    """
    if entries is None:
        return (None,) * len(spec.owners)
    if not isinstance(entries, (list, tuple)):
        raise SpecError(
            f'{where}: holds {show(entries)}; expected an array of {{"layer_idx", "bits", "group_size"}}, one a layer'
        )
    found: dict[int, Quantized | None] = {}
    for position, values in enumerate(entries):
        entry = Fields(values, where, f"[{position}].")
        unknown = [key for key in entry.values if key not in KEYS]
        if unknown:
            raise SpecError(
                f"{where}: [{position}] has the key {show(unknown[0])}; expected {listing(list(KEYS))} only"
            )
        entry.require(["layer_idx", "bits"], "both stated")
        layer = _layer(entry, spec)
        if layer in found:
            raise SpecError(f"{where}: [{position}].layer_idx is {layer} a second time; expected each layer once")
        found[layer] = _quantized(entry, spec, layer)
    return tuple(found.get(layer) for layer in spec.owners)


def uniform_kv_config(
    spec: Spec, bits: int, group_size: int = 64, *, keep_last_full: bool = False
) -> list[dict[str, int]]:
    """The kv_config that gives every layer the same bits, or every layer but the last full-attention cache."""
    full = [layer for layer in spec.owners if spec.layers[layer].attention is Attention.FULL]
    kept = full[-1:] if keep_last_full else []
    return [{"layer_idx": layer, "bits": bits, "group_size": group_size} for layer in spec.owners if layer not in kept]


def _layer(entry: Fields, spec: Spec) -> int:
    layer = entry.integer("layer_idx", 0, len(spec.layers) - 1)
    source = spec.layers[layer].kv_source
    if source != layer:
        raise entry.error(
            "layer_idx", f"a layer that owns a cache: layer {layer} reads that of layer {source}, so list {source}"
        )
    return layer


def _quantized(entry: Fields, spec: Spec, layer: int) -> Quantized | None:
    bits = _one_of(entry, "bits", (0, *BITS))
    if not bits:
        # Whatever a plain layer says about groups is beside the point, but still has to be a group size.
        if "group_size" in entry.values:
            _one_of(entry, "group_size", (0, *GROUP_SIZES))
        return None
    entry.require(["group_size"], "the count of numbers that share a scale")
    group_size = _one_of(entry, "group_size", GROUP_SIZES)
    head_dim = spec.layers[layer].head_dim
    # Whole groups of 32 and more also fill whole uint32 words at any number of bits.
    if head_dim % group_size:
        raise entry.error("group_size", f"a divisor of the {head_dim} numbers of a head in layer {layer}")
    return Quantized(bits, group_size)


def _one_of(entry: Fields, key: str, allowed: tuple[int, ...]) -> int:
    value: Any = entry.take(key)
    if type(value) is not int or value not in allowed:
        raise entry.error(key, f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}")
    return value
