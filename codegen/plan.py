"""Spec to Plan: every decision of a generated file, as words and numbers that the template lays out. Pure.

Decide here, never in the template: if a template needs `and`, the plan lacks a field.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, zip_longest
from typing import Any

from .errors import SpecError, show
from .spec import Attention, Layer, RopeKind, Spec
from .target import Target


class Role(Enum):
    """Who owns the keys and values that a layer attends to."""

    OWN = ""
    SOURCE = "source"
    READER = "reader"


@dataclass(frozen=True)
class Kind:
    """One distinct kind of layer, one function in the file."""

    name: str
    title: str
    details: str
    attention: str
    is_source: bool
    is_reader: bool
    query_heads: int
    kv_heads: int
    head_dim: int
    k_eq_v: bool
    rope_theta: float
    kv_bits: int  # 0: K/V stored as they are
    kv_group_size: int
    rope_freqs: str  # name of the file's frequency array, or empty for RoPE by theta
    eps: float
    experts: bool
    top_k: int
    per_layer_input: bool
    fused_scaled_add: bool
    weights_name: str
    weight_groups: tuple[str, ...]
    hidden_size: int
    qkv_site: str
    attention_site: str
    geglu_site: str
    intermediate_size: int

    @property
    def weights(self) -> tuple[str, ...]:
        """What a layer of this kind binds. Whatever else its module holds is refused at load."""
        return tuple(" ".join(self.weight_groups).split())

    @property
    def projected(self) -> int:
        return self.query_heads * self.head_dim

    @property
    def parameters(self) -> str:
        return ", ".join(self.arguments("kv" if self.is_reader else "cache", "per_layer_input"))

    @property
    def dual_end(self) -> bool:
        """Whether the norms of the dense and the sparse branch are part of what ends the layer."""
        return self.experts and not self.per_layer_input

    @property
    def sums_experts(self) -> bool:
        return self.experts and self.per_layer_input

    @property
    def decode_parameters(self) -> str:
        head = ("w", "s", "h", "x", "kv" if self.is_reader else "cache", "position")
        return ", ".join((*head, "per_layer", "layer") if self.per_layer_input else head)

    @property
    def decode_title(self) -> str:
        return f"{self.name} for one token: the stream h and its input norm x, to those of the next layer."

    @property
    def freqs_argument(self) -> str:
        return f", {self.rope_freqs}" if self.rope_freqs else ""

    def arguments(self, kv: str, per_layer_input: str) -> tuple[str, ...]:
        head = ("w", "x", "mask", kv)
        return (*head, per_layer_input) if self.per_layer_input else head


@dataclass(frozen=True)
class Step:
    """One layer, one line of `forward` (two if it is a source)."""

    index: int
    kind: Kind
    mask: str
    cache: int | None
    source: int

    @property
    def keys(self) -> str:
        """What the layer is handed: its own cache, or the K/V of its source."""
        return f"kv{self.source}" if self.cache is None else f"caches[{self.cache}]"

    @property
    def call(self) -> str:
        extra = f", per_layer[:, :, {self.index}, :]" if self.kind.per_layer_input else ""
        return f"{self.kind.name}(w.layers[{self.index}], h, {self.mask}, {self.keys}{extra})"

    @property
    def decode_call(self) -> str:
        extra = f", per_layer, {self.index}" if self.kind.per_layer_input else ""
        arguments = f"w.layers[{self.index}], s, h, x, {self.keys}, position{extra}"
        return f"s.{self.kind.attention}_layer(decode_{self.kind.name}, {arguments})"


@dataclass(frozen=True)
class Site:
    """A fused site of `decode`: a dataclass of runtime.kernels with its sizes, and the name that the file gives it."""

    name: str
    kind: str
    arguments: tuple[tuple[str, int | float | bool | None], ...]

    @property
    def constant(self) -> str:
        return self.name.upper()


@dataclass(frozen=True)
class Mask:
    """One attention mask a forward, made by the first cache of its kind of layer."""

    name: str
    cache: int
    window: int | None


Cache = tuple[str, int | None] | tuple[str, int | None, int, int]


@dataclass(frozen=True)
class Run:
    """`count` neighbours in a table that are the same `item`: a name of the file, or a literal."""

    item: str | Cache
    count: int


@dataclass(frozen=True)
class Freqs:
    """A frequency array of proportional RoPE, baked at import."""

    name: str
    dims: int
    rotated: int
    base: float
    factor: float


@dataclass(frozen=True)
class Plan:
    source: str
    cure: str
    title: str
    fingerprint: str
    architecture: str
    layers: int
    sentinel: int
    hidden_size: int
    vocab_size: int
    eps: float
    softcap: float | None
    tied: bool
    embed_scale: float
    per_layer_size: int
    per_layer_embed_scale: float
    per_layer_projection_scale: float
    per_layer_input_scale: float
    weights: str
    caches: tuple[Run, ...]
    layer_weights: tuple[Run, ...]
    masks: tuple[Mask, ...]
    freqs: tuple[Freqs, ...]
    sites: tuple[Site, ...]
    kinds: tuple[Kind, ...]
    steps: tuple[Step, ...]

    @property
    def unembed(self) -> str:
        return "unembed" if self.tied else "lm_head"


def make_plan(target: Target) -> Plan:
    spec = target.spec
    roles = _roles(spec)
    names = [_kind_name(spec, index, role) for index, role in enumerate(roles)]
    kinds = {
        name: _kind(target, name, [i for i, other in enumerate(names) if other == name], roles[names.index(name)])
        for name in dict.fromkeys(names)
    }
    cache_of = {layer: position for position, layer in enumerate(spec.owners)}
    sites = _sites(spec, kinds.values())
    if target.sites is not None:
        _check_stated(target.source, target.sites, [site.name for site in sites])
    return Plan(
        source=target.source,
        cure=target.cure,
        title=_title(target),
        fingerprint=spec.fingerprint,
        architecture=spec.architecture,
        layers=len(spec.layers),
        sentinel=spec.sentinel,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        eps=spec.rms_norm_eps,
        softcap=spec.final_logit_softcapping,
        tied=spec.tie_word_embeddings,
        embed_scale=spec.hidden_size**0.5,
        per_layer_size=spec.per_layer_input_size,
        per_layer_embed_scale=spec.per_layer_input_size**0.5,
        per_layer_projection_scale=spec.hidden_size**-0.5,
        per_layer_input_scale=2.0**-0.5,
        weights=_model_weights(spec),
        caches=_runs([_cache(spec, index) for index in spec.owners]),
        layer_weights=_runs([kinds[name].weights_name for name in names]),
        masks=tuple(
            Mask(_mask_name(kind), cache_of[first], _window(spec, kind)) for kind, first in _first_layers(spec).items()
        ),
        freqs=tuple(
            Freqs(_freqs_name(kind), layer.head_dim, layer.rope.rotated, layer.rope.theta, layer.rope.factor)
            for kind, layer in ((kind, spec.layers[first]) for kind, first in _first_layers(spec).items())
            if layer.rope.kind is RopeKind.PROPORTIONAL
        ),
        sites=sites,
        kinds=tuple(kinds.values()),
        steps=tuple(
            Step(index, kinds[names[index]], _mask_name(layer.attention), cache_of.get(index), layer.kv_source)
            for index, layer in enumerate(spec.layers)
        ),
    )


def _sites(spec: Spec, kinds: Iterable[Kind]) -> tuple[Site, ...]:
    """Every fused site that `decode` uses, once, in the order of use."""
    size, eps = spec.hidden_size, spec.rms_norm_eps
    sites: dict[str, Site] = {}

    def add(name: str, kind: str, **arguments: int | float | bool | None) -> None:
        sites.setdefault(name, Site(name, kind, tuple(arguments.items())))

    for kind in kinds:
        theta = None if kind.rope_freqs else kind.rope_theta
        kv_heads = 0 if kind.is_reader else kind.kv_heads
        k_eq_v = kind.k_eq_v and not kind.is_reader
        heads = {"heads": kind.query_heads, "kv_heads": kv_heads, "head_dim": kind.head_dim}
        add(kind.qkv_site, "QKVRope", **heads, eps=eps, theta=theta, k_eq_v=k_eq_v)
        if not kind.kv_bits:
            add(
                kind.attention_site, "Attention", heads=kind.query_heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim
            )
    add("attention_end", "ResidualNorms", size=size, eps=eps, scaled=False, norms=3 if spec.experts else 1)
    for kind in kinds:
        add(kind.geglu_site, "Geglu", size=kind.intermediate_size)
    if spec.experts:
        add("router", "Router", experts=spec.experts.count, top_k=spec.experts.top_k)
        add("experts_geglu", "Geglu", size=spec.experts.intermediate_size, joined=False, experts=spec.experts.top_k)
    if spec.per_layer_input_size:
        add("feedforward_end", "ResidualNorms", size=size, eps=eps, scaled=False, norms=0)
        add("per_layer_gate", "PerLayerGate", size=spec.per_layer_input_size, layers=len(spec.layers))
    if spec.experts and not spec.per_layer_input_size:
        add("layer_end", "DualResidualNorms", size=size, eps=eps)
    else:
        add("layer_end", "ResidualNorms", size=size, eps=eps, scaled=True, norms=1)
    return tuple(sites.values())


def _check_stated(source: str, stated: tuple[str, ...], found: list[str]) -> None:
    for index, (one, expected) in enumerate(zip_longest(stated, found)):
        if one != expected:
            wanted = f"{_or_nothing(expected)}, of {json.dumps(found)}"
            raise SpecError(f"{source}: sites[{index}] is {_or_nothing(one)}; expected {wanted}")


def _or_nothing(name: str | None) -> str:
    return "nothing" if name is None else show(name)


def _roles(spec: Spec) -> tuple[Role, ...]:
    sources = spec.sources
    return tuple(
        Role.READER if layer.kv_source != index else Role.SOURCE if index in sources else Role.OWN
        for index, layer in enumerate(spec.layers)
    )


def _first_layers(spec: Spec) -> dict[Attention, int]:
    """Kinds of attention by first appearance. The first layer of a kind always owns a cache."""
    first: dict[Attention, int] = {}
    for index, layer in enumerate(spec.layers):
        first.setdefault(layer.attention, index)
    return first


def _cache(spec: Spec, layer: int) -> Cache:
    """What a cache must be: its kind, its window, and for quantized K/V the bits and the group size."""
    attention = spec.layers[layer].attention
    stored = spec.kv_of(layer)
    cache = (attention.value, _window(spec, attention))
    return (*cache, stored.bits, stored.group_size) if stored else cache


def _window(spec: Spec, attention: Attention) -> int | None:
    return spec.sliding_window if attention is Attention.SLIDING else None


def _mask_name(attention: Attention) -> str:
    return f"{attention.value}_mask"


def _freqs_name(attention: Attention) -> str:
    return f"{attention.value.upper()}_FREQS"


def _kind_name(spec: Spec, index: int, role: Role) -> str:
    """`sliding`, `full_reader`, `sliding_4bit`; the group size only where one number of bits comes in two."""
    stored = spec.kv_of(index)
    bits = f"{stored.bits}bit" if stored else ""
    groups = {other.group_size for other in spec.kv if other and stored and other.bits == stored.bits}
    group = f"group{stored.group_size}" if stored and len(groups) > 1 else ""
    return "_".join(filter(None, (spec.layers[index].attention.value, role.value, bits, group)))


def _kind(target: Target, name: str, indices: list[int], role: Role) -> Kind:
    spec = target.spec
    layer = spec.layers[indices[0]]
    stored = spec.kv_of(indices[0])
    return Kind(
        name=name,
        title=_kind_title(spec, indices),
        details=_kind_details(spec, layer, role),
        attention=layer.attention.value,
        is_source=role is Role.SOURCE,
        is_reader=role is Role.READER,
        query_heads=layer.query_heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        k_eq_v=layer.k_eq_v,
        rope_theta=layer.rope.theta,
        kv_bits=stored.bits if stored else 0,
        kv_group_size=stored.group_size if stored else 0,
        rope_freqs=_freqs_name(layer.attention) if layer.rope.kind is RopeKind.PROPORTIONAL else "",
        eps=spec.rms_norm_eps,
        experts=spec.experts is not None,
        top_k=spec.experts.top_k if spec.experts else 0,
        per_layer_input=bool(spec.per_layer_input_size),
        fused_scaled_add="scaled_add" in target.fused,
        weights_name=f"{name.upper()}_WEIGHTS",
        weight_groups=_weight_groups(spec, layer, role),
        hidden_size=spec.hidden_size,
        intermediate_size=layer.intermediate_size,
        qkv_site=f"{layer.attention.value}_{'query' if role is Role.READER else 'qkv'}",
        attention_site=f"{layer.attention.value}_attention",
        geglu_site="geglu" if layer.intermediate_size == spec.layers[0].intermediate_size else "wide_geglu",
    )


def _weight_groups(spec: Spec, layer: Layer, role: Role) -> tuple[str, ...]:
    keys = "" if role is Role.READER else "k_proj k_norm " if layer.k_eq_v else "k_proj k_norm v_proj "
    groups = [f"input_layernorm q_proj q_norm {keys}o_proj post_attention_layernorm"]
    groups.append("pre_feedforward_layernorm gate_proj up_proj down_proj post_feedforward_layernorm")
    if spec.experts:
        groups.append("post_feedforward_layernorm_1 pre_feedforward_layernorm_2 post_feedforward_layernorm_2")
        groups.append("router_norm router_proj per_expert_scale switch_glu")
    if spec.per_layer_input_size:
        groups.append("per_layer_input_gate per_layer_projection post_per_layer_input_norm")
    joined = "gated" if role is Role.READER else "qkv_proj gated"
    experts = " routed gated_experts summed_experts" if spec.experts else ""
    per_layer = " per_layer_gated" if spec.per_layer_input_size else ""
    groups.append(f"{joined}{experts}{per_layer}")
    return (*groups, "layer_scalar next_norm")


def _model_weights(spec: Spec) -> str:
    per_layer = "embed_per_layer per_layer_model_projection per_layer_projection_norm "
    head = "unembed" if spec.tie_word_embeddings else "lm_head"
    return f"embed {per_layer if spec.per_layer_input_size else ''}first_norm norm {head}"


def _title(target: Target) -> str:
    """The claim in the first line of the file; the verifier counts the layers of `forward` against it."""
    spec = target.spec
    sliding = sum(layer.attention is Attention.SLIDING for layer in spec.layers)
    readers = len(spec.layers) - len(spec.owners)
    experts = f"{spec.experts.count} experts, {spec.experts.top_k} a token" if spec.experts else "no experts"
    sharing = f"{readers} share the KV of layers {ranges(spec.sources)}" if readers else "no KV sharing"
    count = len(spec.layers)
    noun = "layer" if count == 1 else "layers"
    quantized = sum(stored is not None for stored in spec.kv)
    kv = f", {quantized} of {len(spec.owners)} caches quantized" if quantized else ""
    return f"{target.name}: {count} {noun} ({sliding} sliding, {count - sliding} full), {sharing}, {experts}{kv}."


def _kind_details(spec: Spec, layer: Layer, role: Role) -> str:
    """The second sentence of a kind's docstring."""
    facts = [f"MLP {layer.intermediate_size} wide"]
    if spec.experts:
        facts.append(f"beside experts {spec.experts.intermediate_size} wide")
    if role is Role.READER:
        facts.append(f"reads the K/V of layer {layer.kv_source}")
    if role is Role.SOURCE:
        facts.append("returns its K/V for later layers")
    if layer.k_eq_v and role is not Role.READER:
        facts.append("V is K before its norm and RoPE")
    return "; ".join(facts) + "."


def _kind_title(spec: Spec, indices: list[int]) -> str:
    layer = spec.layers[indices[0]]
    window = f"window {spec.sliding_window}" if layer.attention is Attention.SLIDING else "no window"
    noun = "layer" if len(indices) == 1 else "layers"
    stored = spec.kv_of(indices[0])
    kv = f"; K/V of {stored.bits} bits in groups of {stored.group_size}" if stored else ""
    return (
        f"{layer.attention.value.capitalize()} {noun} {ranges(indices)}: {layer.query_heads} query heads over "
        f"{layer.kv_heads} KV heads of {layer.head_dim}; {window}{kv}."
    )


def _runs(items: list[Any]) -> tuple[Run, ...]:
    return tuple(Run(item, len(list(group))) for item, group in groupby(items))


def ranges(indices: Iterable[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
