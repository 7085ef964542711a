"""A product of decode and the site that reads it as one launch: the bits, how often each is called, what falls back.

Kernels are stood in for by the plain forms of their sites, which count, where a site has a text for CUDA; those that
write in place do.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import test_fast_tier
import test_in_place
import toys
from comparing import BFLOAT16, EIGHT_BIT, FLOAT32, FOUR_BIT, MXFP4, assert_same
from mlx_lm.tuner.utils import remove_lora_layers
from pairs import Pair
from test_adapters import adapt
from test_decode import agree, spied
from test_in_place import PATIENCE, Walk

from straightline.codegen.config import read_config
from straightline.codegen.kv import uniform_kv_config
from straightline.runtime import HiddenTap, make_cache, specialize
from straightline.runtime.in_place import lease_of
from straightline.runtime.in_place.sites import in_place
from straightline.runtime.joint import Waiting
from straightline.runtime.kernels import (
    Attention,
    PerLayerEnd,
    ProductHeads,
    QKVRope,
    QKVRopeInto,
    QuantizedMatvec,
    QuantizedPerLayerGate,
    ResidualNorms,
    Site,
    fast_resolve,
)
from straightline.runtime.kernels.program import Unsupported
from straightline.runtime.kernels.resolve import Resolved
from straightline.runtime.kernels.site import Call
from straightline.runtime.taps import no_tap

JOINTS = (PerLayerEnd, ProductHeads)
# "E6" has a per-layer input too narrow for groups of 32: its projection is not quantized.
PER_LAYER = toys.config(**toys.SHARING | {"hidden_size_per_layer_input": 32})
SHAPES = {"D6": toys.D6, "M6": toys.M6, "E6": toys.E6, "per-layer": PER_LAYER}

EPS = 1e-06
SLIDING, FULL = QKVRope(4, 2, 64, EPS, 10000.0), QKVRope(4, 2, 64, EPS)
SAME = QKVRope(4, 1, 64, EPS, None, k_eq_v=True)
SLIDING_QUERY, FULL_QUERY = QKVRope(4, 0, 64, EPS, 10000.0), QKVRope(4, 0, 64, EPS)
DENSE = {SLIDING: 4, SAME: 2}
SHARING = {SLIDING: 2, FULL: 1, SLIDING_QUERY: 2, FULL_QUERY: 1}
ROPES = {"D6": DENSE, "M6": DENSE, "E6": SHARING, "per-layer": SHARING}


def heads(rope: QKVRope | QKVRopeInto, bits: int = 4) -> ProductHeads:
    return ProductHeads(QuantizedMatvec(64, rope.unit, bits, 32), rope)


def per_layer_end(gate_bits: int = 4) -> PerLayerEnd:
    return PerLayerEnd(
        ResidualNorms(64, EPS, scaled=False, norms=0),
        QuantizedPerLayerGate(64, 32, 6, gate_bits, 32),
        QuantizedMatvec(32, 64, group_size=32),
        ResidualNorms(64, EPS, scaled=True, norms=1),
    )


def a_token(name: str, over: Callable[[QKVRope], QKVRope | QKVRopeInto] = lambda rope: rope) -> Counter[Site]:
    """The joints that a token of this shape calls. over: what a rope is where the token's K/V go."""
    calls: Counter[Site] = Counter({heads(over(rope)): count for rope, count in ROPES[name].items()})
    if name == "per-layer":
        calls[per_layer_end()] = 6
    return calls


def over_slots(rope: QKVRope) -> QKVRope | QKVRopeInto:
    return QKVRopeInto(rope) if rope.kv_heads else replace(rope, grouped=2)


class Kernels:
    """calls: of each site. off: which have no kernel that is exact. writing: whether those in place write."""

    def __init__(self) -> None:
        self.calls: Counter[Site] = Counter()
        self.off: Callable[[Site], bool] = lambda site: False
        self.writing = True

    @property
    def joints(self) -> Counter[Site]:
        return Counter({site: count for site, count in self.calls.items() if isinstance(site, JOINTS)})

    def has(self, site: Site) -> bool:
        try:
            return bool(site.program("cuda")) and not self.off(site)
        except Unsupported:
            return False

    def of(self, site: Site) -> Call:
        def call(*inputs: Any) -> Any:
            assert inputs[0].size == site.unit
            self.calls[site] += 1
            into = site.rope if isinstance(site, ProductHeads) else site
            if not isinstance(into, QKVRopeInto):
                return site.plain(*inputs)
            if not self.writing:
                return site.plain(*inputs)[0]
            if isinstance(site, ProductHeads):
                inputs = (site.product.plain(*inputs[:4]), *inputs[4:])
            file = test_fast_tier if inputs[0].dtype == BFLOAT16 else test_in_place
            return file.writes_in_place(into)(*inputs)

        return call if self.has(site) else site.plain

    def resolved(self, sites: Iterable[Site], *_: Any, kernels: bool | None = None) -> tuple[Resolved, ...]:
        found = []
        for site in sites:
            call = self.of(site) if kernels else site.plain
            state = "kernel" if call != site.plain else "written out" if isinstance(site, Attention) else "plain"
            found.append(Resolved(call, state, "off"))
        return tuple(found)

    def resolve_all(self, *wanted: Any, kernels: bool | None = None) -> tuple[Call, ...]:
        return tuple(one.call for one in self.resolved(*wanted, kernels=kernels))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Of every site, and every product pays."""
    found = Kernels()
    monkeypatch.setattr("straightline.runtime.routes.resolve_all", found.resolve_all)
    monkeypatch.setattr("straightline.runtime.in_place.sites.resolved", found.resolved)
    monkeypatch.setattr("straightline.runtime.routes.pays", lambda product: True)
    return found


def built(config: dict[str, Any], quantize: Any = FOUR_BIT, **how: Any) -> tuple[Any, Counter[str]]:
    module, counts = spied(config)
    model = toys.build(config, quantize=quantize, dtype=FLOAT32)
    return specialize(model, module, strict=True, **{"kernels": True} | how), counts


def of_a_token(kernels: Kernels, model: Any, counts: Counter[str]) -> Counter[Site]:
    """The joints that a token calls, whose bits are forward's."""
    model(toys.tokens(1, 1))  # if the weights have changed, this binds them anew
    kernels.calls.clear()
    agree(model, counts, 1)
    return kernels.joints


def parts(joints: Iterable[Site]) -> set[Site]:
    return {part for site in joints for part in vars(site).values()}


# What is called, and what it gives


@pytest.mark.parametrize("name", SHAPES)
def test_decode_goes_through_joints_and_past_their_parts(name: str, kernels: Kernels) -> None:
    model, counts = built(SHAPES[name])
    kernels.calls.clear()
    model(toys.tokens(1, 5), cache=model.make_cache())
    model(toys.tokens(2, 1))
    assert not kernels.calls  # several tokens, and one without a cache
    agree(model, counts, 3)
    joints = a_token(name)
    assert kernels.joints == Counter({site: 3 * count for site, count in joints.items()})
    assert not parts(joints) & set(kernels.calls)
    assert kernels.calls[ResidualNorms(64, EPS, scaled=True, norms=1)] == (18 if name in ("D6", "E6") else 0)


@pytest.mark.parametrize("name", SHAPES)
def test_taps(name: str, kernels: Kernels) -> None:
    model, _ = built(SHAPES[name])
    caches = model.make_cache(), model.make_cache()
    for length in (5, 1, 1):
        taps = HiddenTap(range(-1, 7)), HiddenTap(range(-1, 7))
        kernels.calls.clear()
        ids = toys.tokens(1, length, seed=length)
        found = model(ids, cache=caches[0], tap=taps[0]), model.monolith(ids, cache=caches[1], tap=taps[1])
        assert_same(*found, "logits")
        assert_same(taps[0].captured, taps[1].captured, "taps")
        assert kernels.joints == (a_token(name) if length == 1 else Counter())


@pytest.mark.parametrize("name", SHAPES)
def test_over_quantized_caches(name: str, kernels: Kernels) -> None:
    entries = uniform_kv_config(read_config(SHAPES[name]), 8, 32, keep_last_full=True)
    module, counts = spied(SHAPES[name], entries)
    model = specialize(toys.build(SHAPES[name], quantize=FOUR_BIT), module, strict=True, kernels=True)
    caches = make_cache(model, entries), make_cache(model, entries)
    for step, length in enumerate((6, 1, 1)):
        ids = toys.tokens(1, length, seed=step)
        kernels.calls.clear()
        assert_same(model(ids, cache=caches[0]), model.monolith(ids, cache=caches[1]), f"logits of call {step}")
        assert kernels.joints == (a_token(name) if length == 1 else Counter())
    assert counts == {"forward": 1, "decode": 2}


def leased(config: dict[str, Any], name: str) -> Walk:
    """A model under a lease, beside one that straightline never sees."""
    walk = Walk(Pair(built(config)[0], toys.build(config, quantize=FOUR_BIT)))
    walk.step(5)
    walk.decode(PATIENCE)
    assert walk.leased
    return walk


@pytest.mark.parametrize("name", SHAPES)
def test_under_a_lease(name: str, kernels: Kernels) -> None:
    """Before and after the rings wrap."""
    walk = leased(SHAPES[name], name)
    kernels.calls.clear()
    walk.decode(6)
    joints = a_token(name, over_slots)
    assert kernels.joints == Counter({site: 6 * count for site, count in joints.items()})
    assert not parts(joints) & set(kernels.calls)
    assert walk.leased
    walk.same_caches()


@pytest.mark.parametrize("name", ["D6", "per-layer"])
def test_in_compiled_layers(name: str, kernels: Kernels) -> None:
    """Full rings and kernels that write nothing: the same token through functions and through compiled ones."""
    walk = leased(SHAPES[name], name)
    walk.decode(3)
    model = walk.pair.model
    bound, lease = model._bound, lease_of(walk.caches[0])
    assert lease is not None
    assert bound.compiled_reason  # the stand-ins evaluate
    kernels.writing = False
    calls = dict(vars(bound.routes[0].in_place.moving))
    del calls["sliding_layer"], calls["full_layer"]
    over = in_place(calls)
    for _ in range(2):
        slots, chosen = lease.begin(over)
        assert chosen is over.settled
        pair = []
        for one in over[:2]:
            kernels.calls.clear()
            pair.append(bound.routes[0].decode(bound.weights.single, one, mx.array([[3]]), slots, no_tap))
        assert_same(*pair, "logits")
    full = Counter({site: count for site, count in a_token(name, over_slots).items() if is_full(site)})
    assert Counter({site: count for site, count in kernels.joints.items() if isinstance(site, ProductHeads)}) == full


def is_full(site: Site) -> bool:
    if not isinstance(site, ProductHeads):
        return False
    return (site.rope.rope if isinstance(site.rope, QKVRopeInto) else site.rope).theta is None


# What falls back


def test_what_is_wrapped_and_comes_back(kernels: Kernels) -> None:
    model, counts = built(PER_LAYER)
    for key, lost in (
        ("self_attn.q_proj", {heads(FULL_QUERY): 1}),
        ("per_layer_input_gate", {per_layer_end(): 6}),
        ("per_layer_projection", {per_layer_end(): 6}),
    ):
        adapt(model, key, layers=1)
        assert of_a_token(kernels, model, counts) == a_token("per-layer") - Counter(lost)
        for site in lost:
            for part in vars(site).values():
                if isinstance(part, ResidualNorms | QKVRope):
                    assert kernels.calls[part] == lost[site]
        remove_lora_layers(model)
        assert of_a_token(kernels, model, counts) == a_token("per-layer")


def test_what_is_wrapped_beside_the_query(kernels: Kernels) -> None:
    model, counts = built(toys.D6)
    adapt(model, "self_attn.k_proj", layers=2)
    assert of_a_token(kernels, model, counts) == a_token("D6") - Counter({heads(SLIDING): 1, heads(SAME): 1})
    assert (kernels.calls[SLIDING], kernels.calls[SAME]) == (1, 1)
    remove_lora_layers(model)
    assert of_a_token(kernels, model, counts) == a_token("D6")


SIX_BIT, EIGHT_OF_32 = FOUR_BIT | {"bits": 6}, EIGHT_BIT | {"group_size": 32}
NONE_AT_THE_END = Counter({per_layer_end(): 6})
OTHERS: dict[str, tuple[str, Any, dict[Site, int], dict[Site, int]]] = {
    "q_proj of 6 bits": ("4.self_attn.q_proj", SIX_BIT, {heads(SLIDING_QUERY): 1}, {}),
    "q_proj of 8 bits": ("4.self_attn.q_proj", EIGHT_OF_32, {heads(SLIDING_QUERY): 1}, {heads(SLIDING_QUERY, 8): 1}),
    "q_proj in MXFP4": ("4.self_attn.q_proj", MXFP4, {heads(SLIDING_QUERY): 1}, {}),
    "q_proj not quantized": ("5.self_attn.q_proj", False, {heads(FULL_QUERY): 1}, {}),
    "v_proj of 8 bits": ("1.self_attn.v_proj", EIGHT_OF_32, {heads(SLIDING): 1}, {}),
    "gate of 6 bits": ("1.per_layer_input_gate", SIX_BIT, NONE_AT_THE_END, {}),
    "gate of 8 bits": ("1.per_layer_input_gate", EIGHT_OF_32, {per_layer_end(): 1}, {per_layer_end(8): 1}),
    "gate not quantized": ("1.per_layer_input_gate", False, NONE_AT_THE_END, {}),
    "projection in MXFP4": ("1.per_layer_projection", MXFP4, NONE_AT_THE_END, {}),
}


@pytest.mark.parametrize(("key", "quantization", "lost", "new"), OTHERS.values(), ids=OTHERS)
def test_one_layer_quantized_otherwise(
    key: str, quantization: Any, lost: dict[Site, int], new: dict[Site, int], kernels: Kernels
) -> None:
    path = f"layers.{key}"
    model, counts = built(PER_LAYER, lambda name, _: quantization if name.endswith(path) else FOUR_BIT)
    assert of_a_token(kernels, model, counts) == a_token("per-layer") - Counter(lost) + Counter(new)


def slots_of(model: Any) -> list[set[str]]:
    """Of each layer, what gives a Waiting, or passes one on."""
    x, waiting = mx.zeros((1, 1, 64)), []
    for layer in model._bound.weights.single.layers:
        given = {"per_layer_projection": mx.zeros((1, 1, 32))}
        slots = [slot for slot in ("qkv_proj", "q_proj", "per_layer_projection") if hasattr(layer, slot)]
        waiting.append({slot for slot in slots if type(getattr(layer, slot)(given.get(slot, x))) is Waiting})
    return waiting


def test_what_waits(kernels: Kernels) -> None:
    own = {"qkv_proj", "per_layer_projection"}
    model, _ = built(PER_LAYER)
    assert slots_of(model) == [own] * 3 + [own - {"qkv_proj"} | {"q_proj"}] * 3
    assert model._bound.readers == {
        *("sliding_qkv", "full_qkv", "sliding_query", "full_query", "feedforward_end", "layer_end")
    }


@pytest.mark.parametrize("off", [*JOINTS, JOINTS], ids=["PerLayerEnd", "ProductHeads", "all"])
def test_nothing_waits_for_a_kernel_that_is_off(off: Any, kernels: Kernels) -> None:
    kernels.off = lambda site: isinstance(site, off)
    model, counts = built(PER_LAYER)
    joints = a_token("per-layer")
    assert of_a_token(kernels, model, counts) == Counter({site: joints[site] for site in joints if kernels.has(site)})
    slots = {PerLayerEnd: {"per_layer_projection"}, ProductHeads: {"qkv_proj", "q_proj"}}
    gone = set.union(*(slots[kind] for kind in slots if kind in (off if isinstance(off, tuple) else (off,))))
    assert not any(waiting & gone for waiting in slots_of(model))
    if off is JOINTS:
        assert model._bound.readers == frozenset()
        assert not any(slots_of(model))


def test_one_end_that_is_off_is_all_of_them(kernels: Kernels) -> None:
    kernels.off = lambda site: site == per_layer_end(8)
    wide = "layers.4.per_layer_input_gate"
    model, counts = built(PER_LAYER, lambda name, _: EIGHT_OF_32 if name.endswith(wide) else FOUR_BIT)
    assert of_a_token(kernels, model, counts) == a_token("per-layer") - NONE_AT_THE_END
    assert kernels.calls[per_layer_end().before] == kernels.calls[per_layer_end().norms] == 6


def test_without_kernels_there_are_none(kernels: Kernels) -> None:
    model, counts = built(PER_LAYER, kernels=False)
    assert not of_a_token(kernels, model, counts)
    assert not kernels.calls
    assert not any(slots_of(model))
    assert model._bound.readers == frozenset()


@pytest.mark.parametrize("name", ["D6", "per-layer"])
@pytest.mark.parametrize("where", ["over caches", "under a lease"])
def test_a_reader_without_its_kernel_gets_the_product(name: str, where: str, kernels: Kernels) -> None:
    """The same slot waits for two readers, one of which has no kernel."""
    over = over_slots if where == "under a lease" else lambda rope: rope
    without = {heads(over(rope)) for rope in ROPES[name]}
    kernels.off = lambda site: site in without
    model, _ = built(SHAPES[name])
    walk = Walk(Pair(model, toys.build(SHAPES[name], quantize=FOUR_BIT)))
    walk.step(5)
    walk.decode(PATIENCE)
    for _ in range(2):
        kernels.calls.clear()
        now = over_slots if walk.leased else lambda rope: rope
        walk.decode(1)
        joints = a_token(name, now)
        assert kernels.joints == Counter({site: joints[site] for site in joints if site not in without})
        for site in without & set(joints):
            assert isinstance(site, ProductHeads)
            assert kernels.calls[site.rope] == joints[site]
        walk.same_caches()  # ends the lease


def test_a_kind_of_layer_without_the_kernel_of_another(kernels: Kernels) -> None:
    """Sliding and full layers are of one width here, so that a slot cannot tell for which of them it waits."""
    without = {heads(FULL), heads(over_slots(FULL))}
    kernels.off = lambda site: site in without
    model, _ = built(PER_LAYER)
    walk = Walk(Pair(model, toys.build(PER_LAYER, quantize=FOUR_BIT)))
    walk.step(5)
    kernels.calls.clear()
    walk.decode(1)
    assert kernels.joints == a_token("per-layer") - Counter({heads(FULL): 1})
    walk.decode(PATIENCE)
    assert walk.leased
    walk.same_caches()


# The fast tier


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterable[None]:
    monkeypatch.setenv("STRAIGHTLINE_CACHE", str(tmp_path))
    fast_resolve.forget()
    test_fast_tier.use(monkeypatch)
    yield
    fast_resolve.forget()


@pytest.mark.usefixtures("fast")
def test_the_fast_tier(kernels: Kernels) -> None:
    """Over caches and under a lease: the same bits with joints and without."""
    config = test_fast_tier.WIDE

    def model() -> Any:
        base = toys.build(config, quantize=FOUR_BIT, dtype=BFLOAT16)
        return specialize(base, spied(config)[0], strict=True, kernels=True, tier="fast")

    with_joints = model()
    kernels.off = lambda site: isinstance(site, JOINTS)
    without = model()
    for one in (with_joints, without):
        assert {state for state, _ in one.dispatch.tier_sites.values()} == {"fast"}
    caches = with_joints.make_cache(), without.make_cache()
    kinds = []
    for step, length in enumerate((5, *(1,) * (PATIENCE + 6))):
        ids = toys.tokens(1, length, seed=step)
        kernels.calls.clear()
        found = with_joints(ids, cache=caches[0])
        kinds.append({type(site.rope) for site in kernels.joints if isinstance(site, ProductHeads)})
        assert length > 1 or sum(kernels.joints.values()) == 6
        assert_same(found, without(ids, cache=caches[1]), f"logits of call {step}")
    assert (kinds[1], kinds[-1]) == ({QKVRope}, {QKVRopeInto})
    assert all(lease_of(each) is not None for each in caches)
