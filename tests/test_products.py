"""The quantized products of decode: which are found, what decode and forward run in their place, and what is held.

The kernels are stood in for by the plain forms of their sites, which count; a GPU is needed for the real ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import mlx.nn as nn
import pytest
import toys
from comparing import BFLOAT16, EIGHT_BIT, FLOAT32, FOUR_BIT, MXFP4
from memory import settled
from mlx_lm.tuner.utils import remove_lora_layers
from test_adapters import adapt
from test_decode import ROOM, WIDE, agree, apart, groups, spied, wholes

from straightline.runtime import specialize
from straightline.runtime.kernels import (
    GatedExperts,
    QuantizedMatvec,
    QuantizedPerLayerGate,
    QuantizedRouter,
    Site,
    SummedExperts,
    report,
)
from straightline.runtime.kernels.states import running
from straightline.runtime.model import text_model
from straightline.runtime.products import LARGE, Product, find_products, pays, with_kernels

PRODUCTS = (GatedExperts, QuantizedMatvec, QuantizedPerLayerGate, QuantizedRouter, SummedExperts)
SHAPES = {"D6": toys.D6, "M6": toys.M6, "E6": toys.E6, "untied": toys.config(tie_word_embeddings=False)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[Site]:
    """Every product pays and has a kernel, whose calls are counted."""
    counted: Counter[Site] = Counter()

    def kernel(site: Site) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            assert inputs[0].size == site.unit
            counted[site] += 1
            return site.plain(*inputs)

        return call

    def resolve_all(sites: Iterable[Site], *_: Any, kernels: bool) -> tuple[Any, ...]:
        return tuple(kernel(site) if isinstance(site, PRODUCTS) and kernels else site.plain for site in sites)

    monkeypatch.setattr("straightline.runtime.routes.resolve_all", resolve_all)
    monkeypatch.setattr("straightline.runtime.routes.pays", lambda product: True)
    return counted


def built(name: str, quantize: Any = FOUR_BIT) -> tuple[Any, Counter[str]]:
    module, counts = spied(SHAPES[name])
    # Experts that are not quantized are for float32 alone on a CPU.
    base = toys.build(SHAPES[name], quantize=quantize, dtype=BFLOAT16 if quantize else FLOAT32)
    return specialize(base, module, strict=True, kernels=True), counts


def found(model: Any, layer: int | None = 0) -> dict[str, tuple[int, ...]]:
    """Slot: bits, inputs, outputs, of one layer or of the model."""
    products = [one for one in find_products(model._bound.files[0], text_model(model)) if one.layer == layer]
    return {one.slot: (one.site.bits, one.site.inputs_size, getattr(one.site, "outputs_size", 0)) for one in products}


def test_what_a_layer_has() -> None:
    model, _ = built("D6")
    attention = {"o_proj": (4, 256, 64), "qkv_proj": (4, 64, 512)}
    assert found(model) == attention | {"gated": (4, 64, 256), "down_proj": (4, 128, 64)}
    assert found(model, 2)["qkv_proj"] == (4, 64, 320)  # K = V: no v_proj
    assert found(model, None) == {"unembed": (4, 64, 97)}
    assert found(built("untied")[0], None) == {"lm_head": (4, 64, 97)}
    experts = found(built("M6")[0])
    assert experts == found(model) | {
        "routed": (4, 64, 0),
        "gated_experts": (4, 64, 0),
        "summed_experts": (4, 64, 0),
    }
    shared = built("E6")[0]
    assert found(shared, None)["per_layer_model_projection"][:2] == (4, 64)
    assert {"q_proj", "per_layer_gated"} < set(found(shared, 4))  # reads the K/V of another layer
    assert not {"q_proj", "per_layer_input_gate"} & set(found(shared, 0))


def test_other_quantizations() -> None:
    assert found(built("D6", None)[0]) == found(built("D6", MXFP4)[0]) == {}
    assert {bits for bits, *_ in found(built("M6", EIGHT_BIT)[0]).values()} == {8}
    mixed = found(built("M6", apart)[0])
    assert "gated" not in mixed and "qkv_proj" not in mixed and "gated_experts" not in mixed
    assert mixed["down_proj"] == (4, 128, 64)


def test_it_pays_for_the_large_and_where_a_launch_is_saved() -> None:
    def product(outputs: int, glu: bool = False) -> Product:
        return Product(0, "slot", QuantizedMatvec(1024, outputs, glu=glu), ())

    outputs = LARGE * 8 // 4 // 1024
    assert not pays(product(outputs)._replace(site=QuantizedMatvec(1024, outputs, bits=8)))
    assert pays(product(outputs)) and not pays(product(outputs - 2)) and pays(product(64, glu=True))
    assert pays(Product(0, "slot", GatedExperts(64, 64, 2), ()))


@pytest.mark.parametrize("quantize", [FOUR_BIT, EIGHT_BIT, apart, None], ids=["4-bit", "8-bit", "apart", "plain"])
@pytest.mark.parametrize("name", SHAPES)
def test_decode_goes_through_them_and_nothing_else_does(name: str, quantize: Any, calls: Counter[Site]) -> None:
    model, counts = built(name, quantize)
    products = find_products(model._bound.files[0], text_model(model))
    calls.clear()
    model(toys.tokens(1, 5), cache=model.make_cache())
    model(toys.tokens(2, 1))
    assert not calls
    agree(model, counts, 3)
    assert calls == Counter({site: 3 * count for site, count in Counter(one.site for one in products).items()})
    assert bool(calls) == (quantize is not None)


def test_not_unless_kernels_are_asked_for(calls: Counter[Site]) -> None:
    module, counts = spied(toys.M6)
    agree(specialize(toys.build(toys.M6, quantize=FOUR_BIT), module, strict=True), counts)
    assert not calls


@pytest.mark.parametrize(
    ("key", "slots"),
    [
        ("mlp.gate_proj", {"gated"}),
        ("mlp.down_proj", {"down_proj"}),
        ("self_attn.k_proj", {"qkv_proj"}),
        ("self_attn.o_proj", {"o_proj"}),
    ],
)
def test_what_is_wrapped_has_none(key: str, slots: set[str], calls: Counter[Site]) -> None:
    model, counts = built("D6")
    every = found(model)
    adapt(model, key)
    agree(model, counts, 1)
    assert set(every) - set(found(model)) == slots
    remove_lora_layers(model)
    calls.clear()
    agree(model, counts, 1)
    assert found(model) == every and sum(calls.values()) == 4 * 6 + 1


def test_weights_that_change_later(calls: Counter[Site]) -> None:
    model, counts = built("M6")
    agree(model, counts, 1)
    layer = model.model.layers[0]
    for module in (layer.mlp.down_proj, layer.mlp.up_proj, layer.experts.switch_glu.up_proj, model.model.embed_tokens):
        module.scales = module.scales * 2
        agree(model, counts, 1)
    del layer.experts.switch_glu.gate_proj["biases"]
    assert "gated_experts" not in found(model)


def test_what_is_quantized_later(calls: Counter[Site]) -> None:
    model, counts = built("D6", None)
    agree(model, counts, 1)
    assert not calls
    nn.quantize(model, **FOUR_BIT)
    agree(model, counts, 1)
    assert sum(calls.values()) == 4 * 6 + 1


@pytest.mark.usefixtures("exact_memory")
def test_weights_are_held_once(calls: Counter[Site]) -> None:
    base = toys.build(WIDE, quantize=FOUR_BIT, dtype=BFLOAT16)
    start = settled()
    model = specialize(base, spied(WIDE)[0], strict=True, kernels=True)
    assert abs(settled() - start) < ROOM
    assert len(wholes(model)) == 12
    for product in find_products(model._bound.files[0], text_model(model)):
        if product.slot == "gated":
            gate, _ = groups(model)[2 * (product.layer or 0) + 1]
            assert product.arrays[0] is gate._joined.whole[0]
    joinable = sum(part.weight.nbytes for parts in groups(model) for part in parts)
    del model, base, product, gate
    assert settled() < start - joinable


def test_a_kernel_that_is_off_leaves_the_slot_alone() -> None:
    model, _ = built("D6")
    every = find_products(model._bound.files[0], text_model(model))
    products = [one for one in every if one.slot in ("gated", "o_proj")]
    weights = model._bound.weights
    single = with_kernels(weights, products, [one.site.plain for one in products])
    assert single is not weights and vars(single.layers[0]) == vars(weights.layers[0])
    single = with_kernels(weights, products, [lambda *inputs: inputs for _ in products])
    changed = {slot for slot, value in vars(single.layers[0]).items() if value is not vars(weights.layers[0])[slot]}
    assert changed == {"gated", "o_proj"} and single.unembed == weights.unembed


def test_the_report_says_why_there_is_no_kernel() -> None:
    built("M6")
    reasons = {site: reason for site, (_, reason) in report().items() if isinstance(site, PRODUCTS)}
    assert GatedExperts(64, 64, 2, group_size=32) in reasons
    assert set(reasons.values()) == {"the default device is the CPU"}


def test_how_they_run_is_said_after_the_sites() -> None:
    model, _ = built("M6")
    states = [(one.name, one.state) for one in running(model)]
    slots = ("gated", "routed", "gated_experts", "summed_experts")
    joints = (  # of the first layer, and what the first full one adds
        *("qkv_proj, sliding_qkv", "qkv_proj, sliding_qkv in place"),
        *("qkv_proj, full_qkv", "qkv_proj, full_qkv in place"),
    )
    assert states[-len(slots + joints) :] == [(name, "plain") for name in slots + joints]
    assert all(states.count((name, "plain")) == 1 for name in slots + joints)  # of six layers alike
