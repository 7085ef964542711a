"""What mlx-lm's own Gemma 4 modules compute at a fused site: the module's code, with stubs for all around the site."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from straightline.runtime.kernels import (
    AttentionScores,
    DualResidualNorms,
    GatedExperts,
    Geglu,
    PerLayerEnd,
    PerLayerGate,
    ProductHeads,
    QKVRope,
    QKVRopeInto,
    QuantizedMatvec,
    QuantizedPerLayerGate,
    QuantizedRouter,
    ResidualNorms,
    Router,
    Site,
    SummedExperts,
)

SLIDING, FULL = "sliding_attention", "full_attention"


def oracle(site: Site, inputs: tuple[Any, ...]) -> tuple[mx.array, ...]:
    """The outputs of the site, in its order, for the inputs of `site.plain`."""
    match site:
        case ResidualNorms(scaled=False, norms=0):
            return before_per_layer_input(site, *inputs)
        case ResidualNorms(scaled=False, norms=1):
            return after_attention(site, *inputs)
        case ResidualNorms(scaled=False, norms=3):
            return after_attention_with_experts(site, *inputs)
        case ResidualNorms(scaled=True, norms=1):
            return layer_end(site, *inputs)
        case DualResidualNorms():
            return layer_end_with_experts(site, *inputs)
        case QKVRope():
            return attention(site, *inputs)
        case AttentionScores():
            return probabilities(site, *inputs)
        case QKVRopeInto():
            return attention_in_place(site, *inputs)
        case Geglu():
            return feedforward(site, *inputs)
        case PerLayerGate():
            return per_layer_gate(site, *inputs)
        case QuantizedMatvec():
            return quantized(site, *inputs)
        case QuantizedPerLayerGate():
            return quantized_per_layer_gate(site, *inputs)
        case GatedExperts():
            return gated_experts(site, *inputs)
        case SummedExperts():
            return summed_experts(site, *inputs)
        case QuantizedRouter():
            x, *weights, scales = inputs
            return router(site, linear(site, *weights)(x), scales)
        case Router():
            return router(site, *inputs)
        case ProductHeads():
            return oracle(site.rope, (*oracle(site.product, inputs[:4]), *inputs[4:]))
        case PerLayerEnd():
            return per_layer_end(site, *inputs)
    raise NotImplementedError(f"no module of mlx-lm has {site}")


class Spy:
    """Calls what it stands for, and keeps what it was given and what came out."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen: Any = None
        self.out: Any = None

    def __call__(self, x: mx.array) -> mx.array:
        self.seen, self.out = x, self.inner(x)
        return self.out


def gives(value: mx.array) -> Any:
    return lambda *args, **kwargs: value


def nothing(x: mx.array) -> mx.array:
    """Minus zero: what leaves every bit of a sum as it is."""
    return mx.full(x.shape, -0.0, dtype=x.dtype)


def arguments(**changes: Any) -> gemma4_text.ModelArgs:
    base = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "head_dim": 64,
        "global_head_dim": 64,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "layer_types": [SLIDING, SLIDING],
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }
    return gemma4_text.ModelArgs.from_dict(base | changes)


def layer_of(site: Any, y: mx.array, **changes: Any) -> Any:
    """A decoder layer whose attention gives y. Its norms have to be set."""
    layer = gemma4_text.DecoderLayer(arguments(hidden_size=site.unit, rms_norm_eps=site.eps, **changes), 0)
    layer.self_attn = gives((y, None, None))
    layer.mlp = nothing
    layer.layer_scalar = None
    return layer


def norm(size: int, eps: float, weight: mx.array) -> nn.RMSNorm:
    module = nn.RMSNorm(size, eps=eps)
    module.weight = weight
    return module


def after_attention(site: Any, y: mx.array, h: mx.array, post: mx.array, following: mx.array) -> tuple[mx.array, ...]:
    layer = layer_of(site, y)
    layer.post_attention_layernorm = norm(site.size, site.eps, post)
    layer.pre_feedforward_layernorm = spy = Spy(norm(site.size, site.eps, following))
    layer(h)
    return spy.seen, spy.out


def after_attention_with_experts(
    site: Any, y: mx.array, h: mx.array, post: mx.array, *following: mx.array
) -> tuple[mx.array, ...]:
    layer = layer_of(site, y, enable_moe_block=True)
    layer.post_attention_layernorm = norm(site.size, site.eps, post)
    layer.pre_feedforward_layernorm = first = Spy(norm(site.size, site.eps, following[0]))
    layer.router.scale, layer.router._root_size = following[1], 1.0  # the site takes the folded product
    layer.router.proj = second = Spy(lambda x: mx.zeros((*x.shape[:-1], 8), dtype=x.dtype))
    layer.pre_feedforward_layernorm_2 = third = Spy(norm(site.size, site.eps, following[2]))
    layer.experts = lambda x, indices, weights: nothing(x)
    layer(h)
    return first.seen, first.out, second.seen, third.out


def before_per_layer_input(site: Any, y: mx.array, h: mx.array, post: mx.array) -> tuple[mx.array, ...]:
    layer = layer_of(site, y, hidden_size_per_layer_input=64)
    layer.post_attention_layernorm = nothing
    layer.mlp = gives(y)
    layer.post_feedforward_layernorm = norm(site.size, site.eps, post)
    layer.per_layer_input_gate = spy = Spy(lambda x: x[..., :64])
    layer.per_layer_projection = gives(y)
    layer(h, per_layer_input=y[..., :64])
    return (spy.seen,)


def layer_end(
    site: Any, y: mx.array, h: mx.array, post: mx.array, scalar: mx.array, following: mx.array
) -> tuple[mx.array, ...]:
    layer = layer_of(site, y)
    layer.post_attention_layernorm = nothing
    layer.mlp = gives(y)
    layer.post_feedforward_layernorm = norm(site.size, site.eps, post)
    layer.layer_scalar = scalar
    out = layer(h)[0]
    return out, norm(site.size, site.eps, following)(out)


def layer_end_with_experts(
    site: Any,
    a: mx.array,
    b: mx.array,
    h: mx.array,
    a_norm: mx.array,
    b_norm: mx.array,
    post: mx.array,
    scalar: mx.array,
    following: mx.array,
) -> tuple[mx.array, ...]:
    layer = layer_of(site, a, enable_moe_block=True)
    layer.post_attention_layernorm = nothing
    layer.mlp, layer.experts, layer.router = gives(a), gives(b), gives((None, None))
    layer.post_feedforward_layernorm_1 = norm(site.size, site.eps, a_norm)
    layer.post_feedforward_layernorm_2 = norm(site.size, site.eps, b_norm)
    layer.post_feedforward_layernorm = norm(site.size, site.eps, post)
    layer.layer_scalar = scalar
    out = layer(h)[0]
    return out, norm(site.size, site.eps, following)(out)


def attention(site: Any, qkv: mx.array, q_norm: mx.array, *rest: Any) -> tuple[mx.array, ...]:
    """mlx-lm's Attention up to the attention itself, which is replaced to see the queries."""
    reader = not site.kv_heads
    kind = FULL if site.theta is None else SLIDING
    layer = gemma4_text.Attention(
        arguments(
            num_attention_heads=site.heads,
            head_dim=site.head_dim,
            global_head_dim=site.head_dim,
            num_key_value_heads=site.kv_heads or 1,
            num_global_key_value_heads=site.kv_heads if site.k_eq_v else None,
            attention_k_eq_v=site.k_eq_v,
            num_kv_shared_layers=1 if reader else 0,
            layer_types=[kind, kind],
            rms_norm_eps=site.eps,
            rope_parameters={
                FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                SLIDING: {"rope_theta": site.theta or 10000.0, "rope_type": "default"},
            },
        ),
        1,
    )
    q_size, kv_size = site.heads * site.head_dim, site.kv_heads * site.head_dim
    layer.q_proj = gives(mx.contiguous(qkv[..., :q_size]))
    layer.q_norm.weight = q_norm
    layer.o_proj = lambda x: x
    seen: dict[str, mx.array] = {}

    def update_and_fetch(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        seen.update(k=keys, v=values)
        return keys, values

    def look(queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen["q"] = queries
        return queries

    with patch.object(gemma4_text, "scaled_dot_product_attention", look):
        if reader:
            layer(qkv, cache=None, shared_kv=(None, None), offset=rest[0])
            return (seen["q"].reshape(site.shapes(qkv.shape[0])[0]),)
        layer.k_norm.weight = rest[0]
        layer.k_proj = gives(mx.contiguous(qkv[..., q_size : q_size + kv_size]))
        if not site.k_eq_v:
            layer.v_proj = gives(mx.contiguous(qkv[..., q_size + kv_size :]))
        layer(qkv, cache=SimpleNamespace(offset=rest[1], update_and_fetch=update_and_fetch))
    return seen["q"], seen["k"], seen["v"]


def probabilities(site: Any, q: mx.array, k: mx.array) -> tuple[mx.array, ...]:
    """mlx-lm's attention over values that are the columns of an identity."""
    rows = k.shape[-1]
    values = mx.broadcast_to(mx.eye(rows, dtype=q.dtype), (1, site.kv_heads, rows, rows))
    q = q.reshape(1, site.heads, 1, site.head_dim)
    k = k[:, :, 0].swapaxes(-1, -2)
    y = gemma4_text.scaled_dot_product_attention(q, k, values, cache=None, scale=1.0, mask=None)
    return (y.reshape(1, site.kv_heads, site.repeats, 1, rows),)


def attention_in_place(site: Any, *inputs: Any) -> tuple[mx.array, ...]:
    """q as the site shapes it, and the buffers with the token's row in them, row by row."""
    *own, keys, values, ring, _ = inputs
    q, *kv = attention(site.rope, *own)
    shift, rows, *steps = ring.tolist()
    row, buffers = (int(own[3].item()) + shift) % rows, []
    for buffer, one, head_step, row_step in zip((keys, values), kv, steps[::2], steps[1::2], strict=True):
        every = [*buffer.reshape(-1, site.rope.head_dim)]
        for head, new in enumerate(one[0]):
            every[head * head_step + row * row_step] = new[0]
        buffers.append(mx.concatenate(every))
    return q.reshape(site.shapes(1)[0]), *buffers


def per_layer_end(site: Any, *inputs: Any) -> tuple[mx.array, ...]:
    (stream,) = oracle(site.before, inputs[:3])
    (gated,) = oracle(site.gate, (stream, *inputs[3:8]))
    return oracle(site.norms, (*oracle(site.projection, (gated, *inputs[8:11])), stream, *inputs[11:]))


def feedforward(site: Any, *inputs: mx.array) -> tuple[mx.array, ...]:
    gate, up = map(mx.contiguous, mx.split(inputs[0], 2, axis=-1)) if site.joined else inputs
    if site.experts:
        return (gemma4_text.GeGLU()(up, gate),)
    return (mlp(gives(gate), gives(up))(gate),)


def mlp(gate: Any, up: Any) -> Any:
    module = gemma4_text.MLP(arguments())
    module.gate_proj, module.up_proj, module.down_proj = gate, up, lambda x: x
    return module


def per_layer_gate(site: Any, gate: mx.array, per_layer: mx.array, index: int) -> tuple[mx.array, ...]:
    return with_gate(site, gives(gate), per_layer, index)


def quantized_per_layer_gate(
    site: Any, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, per_layer: mx.array, index: mx.array
) -> tuple[mx.array, ...]:
    return with_gate(site, gives(linear(site, w, scales, biases)(x)), per_layer, int(index.item()))


def with_gate(site: Any, gate: Any, per_layer: mx.array, index: int) -> tuple[mx.array, ...]:
    h = mx.zeros((per_layer.shape[0], 1, 64), dtype=per_layer.dtype)
    layer = layer_of(SimpleNamespace(unit=64, eps=1e-6), h, hidden_size_per_layer_input=site.size)
    layer.per_layer_input_gate = gate
    layer.per_layer_projection = spy = Spy(gives(h))
    layer(h, per_layer_input=per_layer[:, :, index, :])
    return (spy.seen,)


def quantized(site: Any, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> tuple[mx.array, ...]:
    if not site.glu:
        return (linear(site, w, scales, biases)(x),)
    halves = [[mx.contiguous(part) for part in mx.split(whole, 2, axis=0)] for whole in (w, scales, biases)]
    gate, up = (linear(site, *parts) for parts in zip(*halves, strict=True))
    return (mlp(gate, up)(x),)


def gated_experts(site: Any, x: mx.array, chosen: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
    """mlx-lm's SwitchGLU up to its projection down, which is replaced to see what comes in."""
    module = SwitchGLU(site.group_size, site.width, 1, activation=gemma4_text.GeGLU())
    module.gate_proj, module.up_proj = (experts(site, *weights[start : start + 3]) for start in (0, 3))
    module.down_proj = spy = Seen()
    module(x.reshape(*chosen.shape[:-1], site.inputs_size), chosen)
    return (spy.x,)


def summed_experts(
    site: Any, x: mx.array, chosen: mx.array, gates: mx.array, *weights: mx.array
) -> tuple[mx.array, ...]:
    module = gemma4_text.Experts(arguments(hidden_size=64))
    module.switch_glu.gate_proj = module.switch_glu.up_proj = lambda *args, **kwargs: x
    module.switch_glu.activation = lambda up, gate: x
    module.switch_glu.down_proj = experts(site, *weights)
    return (module(mx.zeros((1, 1, 64), dtype=x.dtype), chosen, gates),)


def router(site: Any, scores: mx.array, scales: mx.array) -> tuple[mx.array, ...]:
    module = gemma4_text.Router(arguments(num_experts=site.experts, top_k_experts=site.top_k))
    module.proj = gives(scores)
    module.per_expert_scale = scales
    return tuple(module(mx.zeros((1, 1, 64), dtype=scores.dtype)))


class Seen(nn.Module):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
        self.x = x
        return x


def experts(site: Any, w: mx.array, scales: mx.array, biases: mx.array) -> QuantizedSwitchLinear:
    settings = {"bias": False, "group_size": site.group_size, "bits": site.bits}
    module = QuantizedSwitchLinear(site.group_size, 8, 1, **settings)
    module.weight, module.scales, module.biases = w, scales, biases
    return module


def linear(site: Any, w: mx.array, scales: mx.array, biases: mx.array) -> nn.QuantizedLinear:
    module = nn.QuantizedLinear(site.group_size, 8, bias=False, group_size=site.group_size, bits=site.bits)
    module.weight, module.scales, module.biases = w, scales, biases
    return module
