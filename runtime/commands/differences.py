"""Which facts of an architecture differ from a published one, field by field of the Spec. Pure."""

from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from typing import Any

from ...codegen.spec import Layer, Rope, Spec
from ...codegen.target import read_target, target_names
from .words import layers

# Spec fields under the names that a config.json has for them, where it has another.
CONFIG_NAMES = {
    "per_layer_input_size": "hidden_size_per_layer_input",
    "per_layer_vocab_size": "vocab_size_per_layer_input",
    "experts.count": "num_experts",
    "experts.top_k": "top_k_experts",
    "experts.intermediate_size": "moe_intermediate_size",
}


def nearest(spec: Spec) -> tuple[str, tuple[str, ...]]:
    """The published target with the fewest differences, and these in sentences. Stored K/V are left out."""
    plain = [name for name in target_names() if not read_target(name).spec.kv]
    found = [(name, differences(spec, read_target(name).spec, name)) for name in plain]
    return min(found, key=lambda one: (_distance(spec, read_target(one[0]).spec), len(one[1])))


def differences(spec: Spec, other: Spec, name: str) -> tuple[str, ...]:
    """Such as "sliding_window is 2048, gemma4-12b has 1024"."""
    found = [
        f"{CONFIG_NAMES.get(key, key)} is {_shown(mine)}, {name} has {_shown(theirs)}"
        for key, mine, theirs in _model_facts(spec, other)
        if mine != theirs
    ]
    per_layer: dict[tuple[str, str, str], list[int]] = {}
    for index, key, value, expected in _layer_differences(spec, other):
        per_layer.setdefault((key, _shown(value), _shown(expected)), []).append(index)
    for (key, value, expected), indices in per_layer.items():
        found.append(f"{key} of {layers(indices)} is {value}, {name} has {expected}")
    return tuple(found)


def _distance(spec: Spec, other: Spec) -> int:
    """How many kinds of fact differ: a window counts as much as a head size, on however many layers."""
    count = sum(bool(mine != theirs) for _, mine, theirs in _model_facts(spec, other))
    return count + len({key for _, key, _, _ in _layer_differences(spec, other)})


def _layer_differences(spec: Spec, other: Spec) -> Iterator[tuple[int, str, Any, Any]]:
    """Layer, fact, ours, theirs. A layer of another kind of attention differs in that; the rest follows from it."""
    for index, (mine, theirs) in enumerate(zip(spec.layers, other.layers, strict=False)):
        expected = _layer_facts(theirs)
        for key, value in _layer_facts(mine).items():
            if value != expected[key] and (key == "attention" or mine.attention is theirs.attention):
                yield index, key, value, expected[key]


def _model_facts(spec: Spec, other: Spec) -> list[tuple[str, Any, Any]]:
    facts: list[tuple[str, Any, Any]] = [("num_hidden_layers", len(spec.layers), len(other.layers))]
    for field in fields(Spec):
        if field.name not in ("layers", "kv", "experts"):
            facts.append((field.name, getattr(spec, field.name), getattr(other, field.name)))
    if (spec.experts is None) != (other.experts is None):
        facts.append(("enable_moe_block", spec.experts is not None, other.experts is not None))
    elif spec.experts and other.experts:
        facts += [
            (f"experts.{name}", getattr(spec.experts, name), getattr(other.experts, name))
            for name in ("count", "top_k", "intermediate_size")
        ]
    return facts


def _layer_facts(layer: Layer) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for field in fields(Layer):
        value = getattr(layer, field.name)
        if isinstance(value, Rope):
            facts |= {f"rope.{part.name}": getattr(value, part.name) for part in fields(Rope)}
        else:
            facts[field.name] = value
    return facts


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return repr(value)
