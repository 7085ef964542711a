"""Where a product of `decode` and the site that reads it are one launch.

The file says both, one after the other. What is said first waits: its slot gives its inputs, and the site's call takes
them along, if it has a kernel for both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .kernels import (
    PerLayerEnd,
    ProductHeads,
    QKVRope,
    QKVRopeInto,
    QuantizedMatvec,
    QuantizedPerLayerGate,
    ResidualNorms,
    Site,
)
from .kernels.site import Call, stands_in
from .products import Product

PER_LAYER = "per_layer_gated"  # stands for all slots of PerLayerEnd
BEFORE = "feedforward_end"  # what it begins with
IN_PLACE = " in place"


class Joint(NamedTuple):
    """The slot `slot` of a layer may wait, with its arrays, for the site `reader`: `site` is both."""

    layer: int
    slot: str
    reader: str
    site: Site
    arrays: tuple[mx.array, ...]

    @property
    def name(self) -> str:
        return f"{self.slot}, {self.reader}"


class Waiting(NamedTuple):
    """inputs: the first ones of the kernels `readers`. product: what a site without one reads, from the first input."""

    inputs: tuple[Any, ...]
    readers: Mapping[str, Call]
    product: Callable[[mx.array], mx.array] | None


def in_place_name(name: str) -> str:
    """The reader that a site is over the slots of a lease."""
    return name + IN_PLACE


def find_joints(
    sites: Mapping[str, Site], over_slots: Mapping[str, Site], products: Sequence[Product], layers: int
) -> tuple[Joint, ...]:
    """All that a model's products and a file's sites allow. over_slots: what sites are in the slots of a lease."""
    return *_pairs(sites, over_slots, products), *_per_layer_ends(sites, products, layers)


def _pairs(sites: Mapping[str, Site], over_slots: Mapping[str, Site], products: Sequence[Product]) -> Iterator[Joint]:
    for layer, slot, product, arrays in products:
        if layer is None or not isinstance(product, QuantizedMatvec):
            continue
        for name, site in sites.items():
            if isinstance(site, QKVRope) and (slot, product.outputs_size) == (_projection(site), site.unit):
                yield Joint(layer, slot, name, ProductHeads(product, site), arrays)
                over = over_slots.get(name)
                if isinstance(over, QKVRope | QKVRopeInto):
                    yield Joint(layer, slot, in_place_name(name), ProductHeads(product, over), arrays)


def _projection(site: QKVRope) -> str:
    """The slot that it reads."""
    return "qkv_proj" if site.kv_heads else "q_proj"


def _per_layer_ends(sites: Mapping[str, Site], products: Sequence[Product], layers: int) -> Iterator[Joint]:
    """One for each layer, or none: the site before the gate waits in all layers, or in none."""
    before, norms = sites.get(BEFORE), sites.get("layer_end")
    if not isinstance(norms, ResidualNorms) or before != ResidualNorms(norms.size, norms.eps, scaled=False, norms=0):
        return
    assert isinstance(before, ResidualNorms)
    gates = {one.layer: one for one in products if isinstance(one.site, QuantizedPerLayerGate)}
    projections = {one.layer: one for one in products if one.slot == "per_layer_projection"}
    if not len(gates) == len(projections) == layers:
        return
    for layer, (gate, projection) in enumerate((gates[layer], projections[layer]) for layer in range(layers)):
        assert isinstance(gate.site, QuantizedPerLayerGate) and isinstance(projection.site, QuantizedMatvec)
        *weights, index = gate.arrays
        arrays = (*weights, index, *projection.arrays)
        yield Joint(layer, PER_LAYER, "layer_end", PerLayerEnd(before, gate.site, projection.site, norms), arrays)


def let_wait(weights: Any, joints: Sequence[Joint], calls: Sequence[Call]) -> frozenset[str]:
    """Slots of these layers whose joint has a kernel give a Waiting from now on. The sites that must expect it."""
    kernels = [(joint, call) for joint, call in zip(joints, calls, strict=True) if stands_in(call, joint.site)]
    ends = [one for one in kernels if one[0].slot == PER_LAYER]
    pairs = [one for one in kernels if one[0].slot != PER_LAYER]
    found: dict[tuple[int, str], tuple[Joint, dict[str, Call]]] = {}
    for joint, call in pairs:
        found.setdefault((joint.layer, joint.slot), (joint, {}))[1][joint.reader] = call
    for joint, readers in found.values():
        owner = weights.layers[joint.layer]
        setattr(owner, joint.slot, _waiting(joint.arrays, readers, getattr(owner, joint.slot)))
    # The slot waits wherever the K/V go, and for whichever of its readers its layer has.
    names = {one.reader.removesuffix(IN_PLACE) for one in joints if (one.layer, one.slot) in found}
    if not ends or len(ends) < len(weights.layers):
        return frozenset(names)
    for joint, call in ends:
        _let_end_wait(weights.layers[joint.layer], joint, call)
    return frozenset(names | {BEFORE, joint.reader})


def _waiting(
    arrays: tuple[mx.array, ...], readers: Mapping[str, Call], product: Callable[[mx.array], mx.array]
) -> Callable[[mx.array], Waiting]:
    weight, scales, biases = arrays
    return lambda x: Waiting((x, weight, scales, biases), readers, product)


def _let_end_wait(owner: Any, joint: Joint, call: Call) -> None:
    """The gate is given the inputs of BEFORE (see `reading`); so is the last reader, once more, as its stream."""
    gate, index, projection = joint.arrays[:3], joint.arrays[3], joint.arrays[4:]
    readers = {joint.reader: lambda *inputs: call(*inputs[:11], *inputs[12:])}
    owner.per_layer_gated = lambda stream, per_layer, *_: (*stream, *gate, per_layer, index)
    owner.per_layer_projection = lambda inputs: Waiting((*inputs, *projection), readers, None)


def reading(reader: str, call: Call) -> Call:
    """The call of the site `reader`, whose first input may wait."""
    if reader == BEFORE:
        return lambda *inputs: inputs

    def read(y: Any, *rest: Any) -> Any:
        if type(y) is not Waiting:
            return call(y, *rest)
        joint = y.readers.get(reader)
        if joint is None:
            assert y.product is not None
            return call(y.product(y.inputs[0]), *rest)
        return joint(*y.inputs, *rest)

    return read
