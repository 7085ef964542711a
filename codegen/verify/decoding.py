"""The bodies of the functions for one token, worked out again from the plan: what the rule for them holds them to."""

from collections.abc import Iterator

from ..plan import Kind, Plan
from .surface import DECODE, PER_LAYER

_BRANCHES = (("dense", 1), ("y", 2))


def decode_bodies(plan: Plan) -> dict[str, list[str]]:
    kinds = {f"{DECODE}_{kind.name}": list(_layer(kind)) for kind in plan.kinds}
    return kinds | {DECODE: list(_decode(plan))}


def _layer(kind: Kind) -> Iterator[str]:
    freqs = f", {kind.rope_freqs}" if kind.rope_freqs else ""
    if kind.is_reader:
        yield f"q = s.{kind.attention}_query(w.q_proj(x), w.q_norm, position{freqs})"
        yield "k, v = kv"
    else:
        yield f"q, k, v = s.{kind.attention}_qkv(cache, w.qkv_proj(x), w.q_norm, w.k_norm, position{freqs})"
    if kind.kv_bits:
        stored = f"group_size={kind.kv_group_size}, bits={kind.kv_bits}"
        yield f"y = quantized_attention(q, k, v, scale=1.0, mask=None, {stored})"
        yield f"y = w.o_proj(y.reshape(1, 1, {kind.query_heads * kind.head_dim}))"
    else:
        yield f"y = w.o_proj(s.{kind.attention}_attention(q, k, v))"
    norms = "w.post_attention_layernorm, w.pre_feedforward_layernorm"
    if kind.experts:
        yield f"h, x, r, e = s.attention_end(y, h, {norms}, w.router_norm, w.pre_feedforward_layernorm_2)"
        yield f"dense = w.down_proj(w.gated(x, s.{kind.geglu_site}))"
        yield from _experts()
    else:
        yield f"h, x = s.attention_end(y, h, {norms})"
        yield f"y = w.down_proj(w.gated(x, s.{kind.geglu_site}))"
    if kind.experts and kind.per_layer_input:
        branches = (f"mx.fast.rms_norm({name}, w.post_feedforward_layernorm_{n}, {kind.eps})" for name, n in _BRANCHES)
        yield f"y = {' + '.join(branches)}"
    if kind.per_layer_input:
        yield "h = s.feedforward_end(y, h, w.post_feedforward_layernorm)"
        yield "y = w.per_layer_projection(w.per_layer_gated(h, per_layer, layer, s.per_layer_gate))"
    end = "post_per_layer_input_norm" if kind.per_layer_input else "post_feedforward_layernorm"
    if kind.experts and not kind.per_layer_input:
        ends = "w.post_feedforward_layernorm_1, w.post_feedforward_layernorm_2, w.post_feedforward_layernorm"
        yield f"h, x = s.layer_end(dense, y, h, {ends}, w.layer_scalar, w.next_norm)"
    else:
        yield f"h, x = s.layer_end(y, h, w.{end}, w.layer_scalar, w.next_norm)"
    yield "return h, x, (k, v)" if kind.is_source else "return h, x"


def _experts() -> Iterator[str]:
    yield "chosen, gates = w.routed(r, w.per_expert_scale, s.router)"
    yield "y = w.summed_experts(w.gated_experts(e, chosen, s.experts_geglu), chosen, gates)"


def _decode(plan: Plan) -> Iterator[str]:
    yield "position = mx.array(caches[0].offset)"
    yield f"h = tap(-1, w.embed(ids) * {plan.embed_scale})"
    if plan.per_layer_size:
        yield f"per_layer = {PER_LAYER}(w, ids, h)"
    yield f"x = mx.fast.rms_norm(h, w.first_norm, {plan.eps})"
    owners = 0
    for index, step in enumerate(plan.steps):
        kind = step.kind
        keys = f"kv{step.source}" if kind.is_reader else f"caches[{owners}]"
        owners += not kind.is_reader
        extra = f", per_layer, {index}" if kind.per_layer_input else ""
        results = f"h, x, kv{index}" if kind.is_source else "h, x"
        arguments = f"{DECODE}_{kind.name}, w.layers[{index}], s, h, x, {keys}, position{extra}"
        yield f"{results} = s.{kind.attention}_layer({arguments})"
        yield f"{'_' if index == len(plan.steps) - 1 else 'h'} = tap({index}, h)"
    yield f"x = tap({len(plan.steps)}, x)"
    head = f"w.{'unembed' if plan.tied else 'lm_head'}(x)"
    yield f"return {head}" if plan.softcap is None else f"return logit_softcap({plan.softcap}, {head})"
