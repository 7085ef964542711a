"""Rules about what a file can reach: attributes and calls, out of tables that no config has a say in."""

from collections.abc import Mapping

import libcst as cst

from ..errors import show
from ..plan import Kind, Plan, Site
from .rule import Violation, Violations
from .surface import OPS, PER_LAYER, SITES, is_decode, signatures
from .tree import Tree, callee, small

# Slots of w that are called, and those that are arrays.
MODEL_MODULES = frozenset({"embed", "embed_per_layer", "per_layer_model_projection", "unembed", "lm_head"})
MODEL_ARRAYS = frozenset({"per_layer_projection_norm", "first_norm", "norm"})
EXPERT_MODULES = frozenset({"router_proj", "switch_glu"})
DECODE_MODULES = frozenset({"qkv_proj", "gated", "gated_experts", "summed_experts", "routed", "per_layer_gated"})
KIND_MODULES = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("per_layer_input_gate", "per_layer_projection"),
    }
)
KIND_ARRAYS = frozenset(
    {
        *("input_layernorm", "q_norm", "k_norm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm", "post_feedforward_layernorm_1"),
        *("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "router_norm", "per_expert_scale"),
        *("post_per_layer_input_norm", "layer_scalar", "next_norm"),
    }
)
# What only the functions for one token read.
ONE_TOKEN = DECODE_MODULES | {"next_norm", "first_norm"}
SLOTS = MODEL_MODULES | MODEL_ARRAYS | EXPERT_MODULES | DECODE_MODULES | KIND_MODULES | KIND_ARRAYS

READABLE = frozenset(
    {
        *("x.shape", "h.shape", "ids.shape", "cache.offset", "w.layers"),
        *(f"w.{slot}" for slot in MODEL_ARRAYS | KIND_ARRAYS),
    }
)
# Names that hold more than arrays, and what each may stand in. As an argument, w is left to the rule for calls.
HANDLES: Mapping[str, tuple[type[cst.CSTNode], ...]] = {
    "mx": (cst.Attribute,),
    "w": (cst.Attribute, cst.Arg),
    "cache": (cst.Attribute,),
    "caches": (cst.Subscript,),
    "tap": (cst.Call,),
    PER_LAYER: (cst.Call,),
    **{name: (cst.Call,) for name in (*OPS, *SITES)},
}

KIND_CALLS = frozenset(
    {
        "mx.array(_)",
        "mx.fast.rms_norm(_, _, _)",
        "mx.fast.rope(_, _, traditional=, base=, scale=, offset=)",
        "mx.fast.rope(_, _, traditional=, base=, scale=, offset=, freqs=)",
        "quantized_attention(_, _, _, scale=, mask=, group_size=, bits=)",
        "cache.update_and_fetch(_, _)",
        "geglu(_, _)",
        "gelu_approx(_)",
        "scaled_add(_, _, _)",
        "_.reshape(_, _, _)",
        "_.reshape(_, _, _, _)",
        "_.transpose(_, _, _, _)",
        *(f"w.{slot}(_)" for slot in KIND_MODULES),
    }
)
PLAIN_CALLS = frozenset({"mx.fast.scaled_dot_product_attention(_, _, _, scale=, mask=)"})
QUANTIZED_CALLS = frozenset({"quantized_attention(_, _, _, scale=, mask=, group_size=, bits=)"})
EXPERT_CALLS = frozenset(
    {
        "mx.argpartition(_, kth=, axis=)",
        "mx.stop_gradient(_)",
        "mx.take_along_axis(_, _, axis=)",
        "mx.softmax(_, axis=)",
        "mx.expand_dims(_, _)",
        "_.sum(_)",
        "w.router_proj(_)",
        "w.switch_glu(_, _)",
    }
)
MODEL_CALLS = frozenset(
    {
        "mx.fast.rms_norm(_, _, _)",
        "caches[_].make_mask(_, return_array=, window_size=)",
        "logit_softcap(_, _)",
        "tap(_, _)",
        "_.reshape(_, _, _, _)",
        *(f"w.{slot}(_)" for slot in MODEL_MODULES),
    }
)
CONSTANT_CALLS = frozenset({"proportional_freqs(dims=, rotated=, base=, factor=)"})


def check_attributes(tree: Tree, plan: Plan) -> Violations:
    parts = (part for part in tree.parts if small(part) not in tree.imports and not is_decode(part))
    for node in (node for part in parts for node in tree.parts[part]):
        parent = tree.parents.get(node)
        match node:
            # What is called is left to the rule for calls.
            case cst.Attribute() if not isinstance(parent, cst.Call):
                allowed = ("mx.fast",) if isinstance(parent, cst.Attribute) else READABLE
                if tree.code(node) not in allowed:
                    expected = "an array of w, a shape or cache.offset"
                    yield Violation(node, f"{show(tree.code(node))} is read", expected)
            case cst.Name(value=name) if not isinstance(parent, HANDLES.get(name, cst.CSTNode)):
                yield Violation(node, f"{name} is bound or passed on", "it to be used where it is")


def check_calls(tree: Tree, plan: Plan) -> Violations:
    kinds = {kind.name: _kind_calls(kind) for kind in plan.kinds}
    own = frozenset(_signature_call(signature) for signature in signatures(plan))
    constants = CONSTANT_CALLS | {_site_call(site) for site in plan.sites}
    for part, nodes in tree.parts.items():
        if is_decode(part):
            continue
        function = part.name.value if isinstance(part, cst.FunctionDef) else ""
        allowed = kinds.get(function, MODEL_CALLS | own) if function else constants
        for node in nodes:
            if isinstance(node, cst.Call):
                call = _call(node)
                if call not in allowed:
                    yield Violation(node, f"{show(call, 120)} is called", "a call that the templates make there")
                elif callee(node.func) != PER_LAYER and any(_is_weights(argument.value) for argument in node.args):
                    yield Violation(node, f"{show(call, 120)} is handed w", "a slot of it")


def _kind_calls(kind: Kind) -> frozenset[str]:
    attention = QUANTIZED_CALLS if kind.kv_bits else PLAIN_CALLS
    return KIND_CALLS | attention | (EXPERT_CALLS if kind.experts else frozenset())


def _call(call: cst.Call) -> str:
    """A call without its values: `mx.softmax(_, axis=)`."""
    arguments = (f"{argument.keyword.value}=" if argument.keyword else "_" for argument in call.args)
    return f"{callee(call.func)}({', '.join(arguments)})"


def _site_call(site: Site) -> str:
    return f"{site.kind}({', '.join(f'{name}=' for name, _ in site.arguments)})"


def _signature_call(signature: str) -> str:
    name, _, parameters = signature.partition("(")
    return f"{name}({', '.join('_' for _ in parameters.split(','))})"


def _is_weights(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "w"
