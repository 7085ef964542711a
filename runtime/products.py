"""The large quantized products of one token, and `decode`'s weights with a kernel in place of each that has one.

Which projection is 4-bit, 8-bit, bf16 or wrapped by LoRA is found at load; `forward` keeps MLX's own calls throughout.
"""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers

from .evaluation import evaluate
from .joining import join
from .kernels import GatedExperts, QuantizedMatvec, QuantizedPerLayerGate, QuantizedRouter, SummedExperts
from .kernels.site import Call, stands_in
from .watch import plain_class
from .weights import DOWN_EXPERTS, GATED_EXPERTS, JOINED, LINEARS, parts_of

# Bytes of packed 4-bit weights from which the kernel saves the device more than twice of what it costs the host more
# than MLX's own. (Of 8-bit weights, MLX's own is as fast.) One that takes more along than the product saves launches,
# whatever its size. Measured on an H200: docs/decode.md.
LARGE = 12 << 20
# Slots that `decode` never reads where it has joined them.
APART = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gated": ("gate_proj", "up_proj"),
    "per_layer_gated": ("per_layer_input_gate",),
    "routed": ("router_proj",),
}
EXPERTS = {"gated_experts": GATED_EXPERTS, "summed_experts": (DOWN_EXPERTS,)}
MODEL = {"unembed": "embed_tokens", "per_layer_model_projection": "per_layer_model_projection"}


class Product(NamedTuple):
    """A quantized product of `decode`: the slot of a layer, or of the model where layer is None, and its arrays."""

    layer: int | None
    slot: str
    site: QuantizedMatvec | QuantizedPerLayerGate | QuantizedRouter | GatedExperts | SummedExperts
    arrays: tuple[mx.array, ...]


def pays(product: Product) -> bool:
    """Whether the kernel is worth its launch."""
    site = product.site
    if not isinstance(site, QuantizedMatvec) or site.glu:
        return True
    return site.bits == 4 and site.packed_bytes >= LARGE


def find_products(file: ModuleType, text: nn.Module) -> tuple[Product, ...]:
    """All of a model that is bound to this file, joined where they are."""
    return tuple(_products(file, text))


def _products(file: ModuleType, text: nn.Module) -> Iterator[Product]:
    inner = text["model"]
    for index, (layer, groups) in enumerate(zip(inner["layers"], file.LAYER_WEIGHTS, strict=True)):
        slots = " ".join(groups).split()
        apart = {slot for whole, parts in APART.items() if whole in slots for slot in parts}
        for slot in slots:
            if slot in EXPERTS:
                yield from _experts(index, slot, parts_of(EXPERTS[slot], layer), file.ROUTER.top_k)
            if slot == "routed":
                for one in _product(index, slot, parts_of((LINEARS["router_proj"],), layer)):
                    yield _routed(one, file.ROUTER.top_k)
            if slot == "per_layer_gated":
                for one in _product(index, slot, parts_of((LINEARS["per_layer_input_gate"],), layer)):
                    yield _per_layer(one, index, len(file.LAYER_WEIGHTS))
            paths = JOINED.get(slot) or ((LINEARS[slot],) if slot in LINEARS and slot not in apart else ())
            yield from _product(index, slot, parts_of(paths, layer))
    for slot in file.MODEL_WEIGHTS.split():
        if slot in MODEL:
            yield from _product(None, slot, parts_of((MODEL[slot],), inner))
        if slot == "lm_head":
            yield from _product(None, slot, parts_of((slot,), text))


def _product(layer: int | None, slot: str, parts: Sequence[Any]) -> Iterator[Product]:
    """One, if these parts are one matrix of affine weights without a bias."""
    if not parts or plain_class(parts[0]) not in (nn.QuantizedLinear, nn.QuantizedEmbedding) or "bias" in parts[0]:
        return
    first = parts[0]
    arrays = join(list(parts)) if len(parts) > 1 else (first["weight"], first["scales"], first.get("biases"))
    if arrays is None or first.mode != "affine":
        return
    weight, scales, biases = arrays
    if biases is None:
        return
    outputs, words = weight.shape
    site = QuantizedMatvec(words * 32 // first.bits, outputs, first.bits, first.group_size, glu=slot == "gated")
    yield Product(layer, slot, site, (weight, scales, biases))


def _routed(product: Product, top_k: int) -> Product:
    """The same product with what the router chooses by it."""
    site = product.site
    assert isinstance(site, QuantizedMatvec)
    router = QuantizedRouter(site.inputs_size, site.outputs_size, top_k, site.bits, site.group_size)
    return product._replace(site=router)


def _per_layer(product: Product, layer: int, layers: int) -> Product:
    """The same product with its gate; the layer as an array, which is what a kernel can read."""
    site = product.site
    assert isinstance(site, QuantizedMatvec)
    gate = QuantizedPerLayerGate(site.inputs_size, site.outputs_size, layers, site.bits, site.group_size)
    index = mx.array(layer, dtype=mx.int32)
    evaluate(index)
    return product._replace(site=gate, arrays=(*product.arrays, index))


def _experts(layer: int, slot: str, parts: Sequence[Any], top_k: int) -> Iterator[Product]:
    """One, if these parts of the experts are affine weights without a bias, and alike."""
    if any(plain_class(part) is not switch_layers.QuantizedSwitchLinear or "bias" in part for part in parts):
        return
    arrays = [part.get(key) for part in parts for key in ("weight", "scales", "biases")]
    alike = {(part.bits, part.group_size, part.mode, part.global_scale, part["weight"].shape) for part in parts}
    first = parts[0]
    unlike = len(alike) > 1 or first.mode != "affine" or first.global_scale is not None
    if unlike or any(array is None for array in arrays):
        return
    _, width, words = first["weight"].shape
    kind = GatedExperts if slot == "gated_experts" else SummedExperts
    site = kind(words * 32 // first.bits, width, top_k, first.bits, first.group_size)
    yield Product(layer, slot, site, tuple(arrays))


def with_kernels(weights: Any, products: Sequence[Product], calls: Sequence[Call]) -> Any:
    """`weights` for one token: those of `products` whose call is not the plain form take it. Shares all else."""
    single = SimpleNamespace(**vars(weights))
    single.layers = [SimpleNamespace(**vars(layer)) for layer in weights.layers]
    for product, call in zip(products, calls, strict=True):
        if stands_in(call, product.site):
            owner = single if product.layer is None else single.layers[product.layer]
            setattr(owner, product.slot, _launch(call, product))
    return single


def _launch(call: Call, product: Product) -> Callable[..., mx.array]:
    """What the slot is called with; a kernel with geglu in it has no use for the one it is handed."""
    arrays = product.arrays
    if isinstance(product.site, GatedExperts):
        return lambda x, chosen, geglu: call(x, chosen, *arrays)
    if isinstance(product.site, SummedExperts):
        return lambda x, chosen, gates: call(x, chosen, gates, *arrays)
    if isinstance(product.site, QuantizedPerLayerGate):
        weight, scales, biases, index = arrays
        return lambda h, per_layer, layer, gate: call(h, weight, scales, biases, per_layer, index)
    weight, scales, biases = arrays
    if isinstance(product.site, QuantizedRouter):
        return lambda x, expert_scales, router: call(x, weight, scales, biases, expert_scales)
    if product.site.glu:
        return lambda x, geglu: call(x, weight, scales, biases)
    return lambda x: call(x, weight, scales, biases)
