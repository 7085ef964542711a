"""Binds a loaded model's arrays to the names that a generated file reads. Shares them; copies nothing.

Checkpoint facts end here: which projection is 4-bit, 8-bit, bf16 or wrapped by LoRA becomes a callable of one argument.
"""

from collections.abc import Callable
from functools import reduce
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text, switch_layers
from mlx_lm.tuner.lora import LoRALinear

from .errors import StraightlineError
from .evaluation import evaluate
from .joining import Arrays, join, join_all
from .watch import plain_class

# What a generated file calls it, and where mlx-lm keeps it.
NORMS = {
    "input_layernorm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "post_feedforward_layernorm_1": "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2": "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2": "post_feedforward_layernorm_2",
    "post_per_layer_input_norm": "post_per_layer_input_norm",
    "per_layer_projection_norm": "per_layer_projection_norm",
    "norm": "norm",
}
LINEARS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "router_proj": "router.proj",
    "per_layer_input_gate": "per_layer_input_gate",
    "per_layer_projection": "per_layer_projection",
    "per_layer_model_projection": "per_layer_model_projection",
}
MODULES = {"embed": "embed_tokens", "embed_per_layer": "embed_tokens_per_layer", "switch_glu": "experts.switch_glu"}
JOINED = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gated": ("mlp.gate_proj", "mlp.up_proj"),
}
GATED_EXPERTS = ("experts.switch_glu.gate_proj", "experts.switch_glu.up_proj")
SORTED = 64  # rows of experts from which mlx-lm's SwitchGLU sorts them
DOWN_EXPERTS = "experts.switch_glu.down_proj"
ARRAYS = {"layer_scalar": "layer_scalar", "per_expert_scale": "router.per_expert_scale"}

# Whose __call__ the templates transcribe: a module of another class computes something else.
TRANSCRIBED = {
    "self_attn": gemma4_text.Attention,
    "mlp": gemma4_text.MLP,
    "router": gemma4_text.Router,
    "experts": gemma4_text.Experts,
    "experts.switch_glu": switch_layers.SwitchGLU,
}


def bind(file: ModuleType, text: nn.Module) -> SimpleNamespace:
    """The `w` of a generated file, from an mlx-lm `gemma4_text.Model`.

    Raises StraightlineError for a tensor that the file reads and the model lacks, and the other way round.
    """
    inner = text["model"]
    _expect_class(inner, gemma4_text.Gemma4TextModel, "model")
    if len(inner["layers"]) != file.LAYERS:
        raise StraightlineError(f"the model has {len(inner['layers'])} layers; the file expects {file.LAYERS}")
    layers = inner["layers"]
    for index, layer in enumerate(layers):
        _expect_class(layer, gemma4_text.DecoderLayer, f"layers.{index}")
        for path, expected in TRANSCRIBED.items():
            found = _find(layer, path)
            if found is not None:
                _expect_class(found, expected, f"layers.{index}.{path}")
    groups = [parts_of(paths, layer) for layer in layers for paths in JOINED.values()]
    join_all(groups)
    norms = [_bind_slot("input_layernorm", layer, f"layers.{index}.", {})[0] for index, layer in enumerate(layers)]
    norms.append(_bind_slot("norm", inner, "", {})[0])
    extra = {"text": text, "first_norm": norms[0]}
    weights = _bind_slots(file.MODEL_WEIGHTS.split(), inner, "", extra, ignore=("layers",))
    weights.layers = [
        _bind_slots(" ".join(slots).split(), layer, f"layers.{index}.", {"next_norm": norms[index + 1]})
        for index, (layer, slots) in enumerate(zip(layers, file.LAYER_WEIGHTS, strict=True))
    ]
    weights.one_token = all(_in_one_row(parts, text) for parts in groups)
    # Constants baked at import, should that have been inside a trace of mx.compile.
    evaluate([value for value in vars(file).values() if isinstance(value, mx.array)])
    return weights


def _bind_slots(
    slots: list[str],
    module: nn.Module,
    where: str,
    extra: dict[str, Any],
    ignore: tuple[str, ...] = (),
) -> SimpleNamespace:
    bound = SimpleNamespace()
    used: set[str] = set(ignore)
    for slot in slots:
        value, paths = _bind_slot(slot, module, where, extra)
        setattr(bound, slot, value)
        used.update(paths)
    left = sorted(name for name, _ in tree_flatten(module.parameters()) if not _covered(name, used))
    if left:
        raise StraightlineError(f"{where}{left[0]} is in the model, but the file does not read it")
    return bound


def _bind_slot(slot: str, module: nn.Module, where: str, extra: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The value of one slot, and the paths of the parameters that it covers."""
    if slot in NORMS:
        norm = _get(module, NORMS[slot], where)
        _expect_class(norm, nn.RMSNorm, where + NORMS[slot])
        return norm["weight"], (NORMS[slot],)
    if slot in LINEARS:
        return linear(_get(module, LINEARS[slot], where)), (LINEARS[slot],)
    if slot in MODULES:
        return _get(module, MODULES[slot], where), (MODULES[slot],)
    if slot in ARRAYS:
        return _get(module, ARRAYS[slot], where), (ARRAYS[slot],)
    if slot in JOINED:
        call = joined(parts_of(JOINED[slot], module))
        return (gated(call) if slot == "gated" else call), ()
    if slot == "routed":
        return routed(linear(_get(module, LINEARS["router_proj"], where))), ()
    if slot == "per_layer_gated":
        return per_layer_gated(linear(_get(module, LINEARS["per_layer_input_gate"], where))), ()
    if slot == "gated_experts":
        return gated_experts(*(expert_linear(_get(module, path, where), False) for path in GATED_EXPERTS)), ()
    if slot == "summed_experts":
        return summed_experts(expert_linear(_get(module, DOWN_EXPERTS, where), True)), ()
    if slot in extra:
        return extra[slot], ()
    if slot == "unembed":
        return _get(module, "embed_tokens", where).as_linear, ("embed_tokens",)
    if slot == "lm_head":
        return linear(_get(extra["text"], "lm_head", where)), ()
    if slot == "router_norm":
        # The monolith multiplies the two at every call; the product is the same bits.
        folded = _get(module, "router.scale", where) * module["router"]._root_size
        evaluate(folded)
        return folded, ("router.scale",)
    raise StraightlineError(f"the file reads {slot}; expected a file made by this version of straightline")


def linear(module: Any) -> Callable[[mx.array], mx.array]:
    """A projection as a callable: mlx-lm's own operation on its arrays, or the module itself if of another class."""
    if plain_class(module) is nn.QuantizedLinear and "bias" not in module:
        return _quantized_linear(module)
    if plain_class(module) is nn.Linear and "bias" not in module:
        transposed: mx.array = module["weight"].T
        evaluate(transposed)
        return lambda x: x @ transposed
    call: Callable[[mx.array], mx.array] = module
    return call


def joined(parts: list[Any]) -> Callable[[mx.array], mx.array]:
    """Several projections of the same input as one: [.., a + b + c]."""
    whole = join(parts)
    if whole is not None:
        return _quantized_matmul(whole, parts[0])
    calls = [linear(part) for part in parts]
    return lambda x: mx.concatenate([call(x) for call in calls], axis=-1)


def gated(gate_up: Callable[[mx.array], mx.array]) -> Callable[[mx.array, Callable[[mx.array], mx.array]], mx.array]:
    """(x, geglu) -> geglu of the joined row of gate and up. A kernel may do both at once."""
    return lambda x, geglu: geglu(gate_up(x))


def per_layer_gated(project: Callable[[mx.array], mx.array]) -> Callable[..., mx.array]:
    """(h, per_layer, layer, gate) -> gate of the projection of h and a per-layer input. A kernel may do both."""
    return lambda h, per_layer, layer, gate: gate(project(h), per_layer, layer)


def routed(project: Callable[[mx.array], mx.array]) -> Callable[..., Any]:
    """(x, scales, router) -> what the router makes of the scores of x. A kernel may do both."""
    return lambda x, scales, router: router(project(x), scales)


def gated_experts(gate: Callable[..., mx.array], up: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """(x, chosen, geglu) -> geglu of what the chosen experts' gate and up give. A kernel may do all three at once."""

    def gated_experts(x: mx.array, chosen: mx.array, geglu: Callable[..., mx.array]) -> mx.array:
        x = mx.expand_dims(x, (2, 3))
        return geglu(gate(x, chosen), up(x, chosen))

    return gated_experts


def summed_experts(down: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """(x, chosen, gates) -> the sum over the chosen experts of what their projection down gives, times their gates."""

    def summed_experts(x: mx.array, chosen: mx.array, gates: mx.array) -> mx.array:
        total: mx.array = (mx.expand_dims(gates, -1) * down(x, chosen).squeeze(-2)).sum(-2)
        return total

    return summed_experts


def for_blocks(weights: Any) -> Any:
    """`decode`'s weights for several tokens: as many as mlx-lm sorts by expert go through its SwitchGLU as a whole."""
    if not hasattr(weights.layers[0], "switch_glu"):
        return weights
    several = SimpleNamespace(**vars(weights))
    several.layers = [SimpleNamespace(**vars(layer) | _experts_of_block(layer)) for layer in weights.layers]
    return several


def with_heads_apart(weights: Any) -> Any:
    """As `weights`, with q, k and v of a layer in a tuple in place of side by side."""
    several = SimpleNamespace(**vars(weights))
    several.layers = [SimpleNamespace(**vars(layer)) for layer in weights.layers]
    for layer in several.layers:
        if hasattr(layer, "qkv_proj"):
            layer.qkv_proj = _each(
                [vars(layer)[name] for name in ("q_proj", "k_proj", "v_proj") if name in vars(layer)]
            )
    return several


def _each(calls: list[Callable[[mx.array], mx.array]]) -> Callable[[mx.array], tuple[mx.array, ...]]:
    return lambda x: tuple(call(x) for call in calls)


def _experts_of_block(layer: Any) -> dict[str, Callable[..., mx.array]]:
    gated, summed, switch_glu = layer.gated_experts, layer.summed_experts, layer.switch_glu

    def gated_experts(x: mx.array, chosen: mx.array, geglu: Callable[..., mx.array]) -> mx.array:
        found: mx.array = gated(x, chosen, geglu) if chosen.size < SORTED else x
        return found

    def summed_experts(x: mx.array, chosen: mx.array, gates: mx.array) -> mx.array:
        if chosen.size < SORTED:
            return cast(mx.array, summed(x, chosen, gates))
        total: mx.array = (mx.expand_dims(gates, -1) * switch_glu(x, chosen)).sum(-2)
        return total

    return {"gated_experts": gated_experts, "summed_experts": summed_experts}


def parts_of(paths: tuple[str, ...], module: nn.Module) -> list[Any]:
    """K = V layers have no v_proj."""
    return [part for part in (_find(module, path) for path in paths) if part is not None]


def _in_one_row(parts: list[Any], text: nn.Module) -> bool:
    """Whether the results of all parts can stand in one row: side by side, arrays of two dtypes would become one."""
    dtypes = [_result_dtypes(part) for part in parts]
    if len(parts) < 2 or None in dtypes:
        return len(parts) < 2
    return all(one == dtypes[0] for one in dtypes) or len(floating(text)) == 1


def _result_dtypes(module: Any) -> set[mx.Dtype] | None:
    """What the dtype of a projection's result depends on, beside its input's; None if nobody knows."""
    kind = plain_class(module)
    if kind is LoRALinear:  # adds in the dtype of its linear
        return _result_dtypes(module.linear)
    return floating(module) if kind in (nn.Linear, nn.QuantizedLinear) else None


def floating(module: nn.Module) -> set[mx.Dtype]:
    """The dtypes of all floating parameters."""
    return {value.dtype for _, value in tree_flatten(module.parameters())} - {mx.uint32, mx.uint8}


def expert_linear(module: Any, is_down: bool) -> Callable[[mx.array, mx.array], mx.array]:
    """(x, chosen) -> [B, L, top_k, 1, out]: the rows of x said outright, which MLX otherwise works out.

    x is [B, L, 1, 1, in], or [B, L, top_k, 1, in] for the projection down.
    """
    call: Callable[[mx.array, mx.array], mx.array] = module
    exact = plain_class(module) is switch_layers.QuantizedSwitchLinear and "bias" not in module
    if not exact or module.global_scale is not None:
        return call
    weight, scales, biases = module["weight"], module["scales"], module.get("biases")
    group_size, bits, mode = module.group_size, module.bits, module.mode
    rows: dict[tuple[int, ...], mx.array] = {}

    def expert_linear(x: mx.array, chosen: mx.array) -> mx.array:
        shape = chosen.shape
        if shape not in rows:
            made = (mx.arange(chosen.size, dtype=mx.uint32) // (1 if is_down else shape[-1])).reshape(shape)
            mx.eval(made)
            rows[shape] = made  # evaluated, since other threads find it
        y: mx.array = mx.gather_qmm(
            x,
            weight,
            scales,
            biases,
            lhs_indices=rows[shape],
            rhs_indices=chosen,
            transpose=True,
            group_size=group_size,
            bits=bits,
            mode=mode,
        )
        return y

    return expert_linear


def _quantized_linear(module: Any) -> Callable[[mx.array], mx.array]:
    return _quantized_matmul((module["weight"], module["scales"], module.get("biases")), module)


def _quantized_matmul(arrays: Arrays, module: Any) -> Callable[[mx.array], mx.array]:
    weight, scales, biases = arrays
    group_size, bits, mode = module.group_size, module.bits, module.mode

    def quantized_linear(x: mx.array) -> mx.array:
        y: mx.array = mx.quantized_matmul(
            x, weight, scales=scales, biases=biases, transpose=True, group_size=group_size, bits=bits, mode=mode
        )
        return y

    return quantized_linear


def _find(module: Any, path: str) -> Any:
    return reduce(
        lambda found, key: found.get(key) if found is not None else None, filter(None, path.split(".")), module
    )


def _get(module: nn.Module, path: str, where: str) -> Any:
    found = _find(module, path)
    if found is None:
        raise StraightlineError(f"{where}{path} is not in the model; the file reads it")
    return found


def _expect_class(module: object, expected: type, where: str) -> None:
    found = plain_class(module)
    if found is not expected:
        raise StraightlineError(f"{where} is {found.__module__}.{found.__name__}; the file expects {expected.__name__}")


def _covered(name: str, used: set[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in used)
