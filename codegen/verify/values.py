"""Rules about values: numbers in functions, words in data, and what each constant works out to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from ..errors import listing, show
from ..plan import Kind, Plan
from .reach import SLOTS
from .rule import START, Violation, Violations
from .surface import PER_LAYER, is_decode
from .tree import Tree, bound, callee


@dataclass(frozen=True)
class Made:
    """What a constant is that a call makes: not the tuple of the call's arguments, and nothing to multiply."""

    function: str
    arguments: tuple[object, ...]

    def __repr__(self) -> str:
        return f"{self.function}{self.arguments!r}"


Number = float | None  # an int or a bool too; they are told apart by how Python spells them
Sites = Mapping[str, tuple[Number, ...]]  # by what a number stands in: the innermost call, or an operator

WORDS = SLOTS | {"sliding", "full"}
MOST_REPEATS = 512
BUILTINS: Mapping[str, object] = {"None": None, "False": False, "True": True}


def check_literals(tree: Tree, plan: Plan) -> Violations:
    sites = _model_sites(plan) | {kind.name: _kind_sites(kind) for kind in plan.kinds}
    for function in tree.functions:
        if is_decode(function.node):
            continue
        allowed = {site: {repr(value) for value in values} for site, values in sites[function.name].items()}
        for node in function.nodes:
            match node:
                case cst.SimpleString() if node is not function.docstring:
                    yield Violation(node, f"the text {show(node.value)} is in {function.name}", "only its docstring")
                case cst.Integer() | cst.Float() | cst.Name(value="None" | "False" | "True"):
                    negative = isinstance(tree.parents[node], cst.UnaryOperation)
                    text = f"-{node.value}" if negative else node.value
                    site = _site(node, tree)
                    if text not in allowed.get(site, ()):
                        expected = " or ".join(sorted(allowed.get(site, ()))[:8]) or "no number"
                        yield Violation(node, f"{show(text)} stands in {site} of {function.name}", expected)


def _site(node: cst.CSTNode, tree: Tree) -> str:
    match tree.parents.get(node):
        case cst.Call(func=function):
            return callee(function)
        case cst.BinaryOperation(operator=cst.Multiply()):
            return "*"
        case cst.BinaryOperation():
            return "+"
        case cst.Subscript():
            return "[]"
        case cst.Return() | cst.Assign() | None:
            return "a statement"
        case parent:
            return _site(parent, tree)


def _kind_sites(kind: Kind) -> Sites:
    return {
        "mx.fast.rms_norm": (None, kind.eps),
        "_.reshape": (kind.query_heads, kind.kv_heads, kind.head_dim, kind.projected),
        "_.transpose": (0, 2, 1, 3),
        "mx.fast.rope": (kind.head_dim, False, None if kind.rope_freqs else kind.rope_theta, 1.0),
        "mx.fast.scaled_dot_product_attention": (1.0,),
        "quantized_attention": (1.0, kind.kv_group_size, kind.kv_bits),
        "mx.argpartition": (-kind.top_k, -1),
        "[]": (-kind.top_k,),
        "mx.take_along_axis": (-1,),
        "mx.softmax": (-1,),
        "mx.expand_dims": (-1,),
        "_.sum": (-2,),
    }


def _model_sites(plan: Plan) -> dict[str, Sites]:
    scales = (plan.per_layer_embed_scale, plan.per_layer_projection_scale, plan.per_layer_input_scale)
    return {
        PER_LAYER: {
            "*": scales,
            "_.reshape": (plan.layers, plan.per_layer_size),
            "mx.fast.rms_norm": (plan.eps,),
        },
        "forward": {
            "tap": tuple(range(-1, plan.layers + 1)),
            "[]": (0, 1, *range(plan.layers)),
            "*": (plan.embed_scale,),
            "caches[_].make_mask": (False, *(mask.window for mask in plan.masks)),
            "mx.fast.rms_norm": (plan.eps,),
            "logit_softcap": (plan.softcap,),
        },
    }


def check_words(tree: Tree, plan: Plan) -> Violations:
    """Asks the plan nothing: whatever a plan says, only these words and one fingerprint can be data."""
    docstrings = {tree.docstring, *(function.docstring for function in tree.functions)}
    for nodes in tree.parts.values():
        for node in nodes:
            if not isinstance(node, cst.SimpleString):
                continue
            if node in docstrings:
                if not re.fullmatch(r'"""[\w ,.:;/()\[\]\n-]+"""', node.value):
                    yield Violation(node, "this docstring holds odd marks", "words, numbers and , . : ; / ( ) [ ] -")
            elif not re.fullmatch(r"(['\"])[\w ]+\1", node.value):
                yield Violation(node, f"the text {show(node.value)} is data", "known words in plain quotes")
            elif not re.fullmatch("[0-9a-f]{16}", node.raw_value) and not WORDS.issuperset(node.raw_value.split(" ")):
                yield Violation(node, f"the text {show(node.raw_value)} is data", "known words, or a fingerprint")


def check_constants(tree: Tree, plan: Plan) -> Violations:
    expected = _constants(plan)
    names: dict[str, object] = {}
    for constant in tree.constants:
        (target,) = bound(constant)
        name = target.value
        names[name] = value = _evaluate(constant.value, names)
        if name not in expected:
            yield Violation(target, f"{name} is a constant", f"only {listing([*expected], 24)}")
        elif repr(value) != repr(expected[name]):
            yield Violation(constant.value, *_told_apart(name, value, expected[name]))
    absent = [name for name in expected if name not in names]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        yield Violation(START, f"{listing(absent)} {verb} absent", "each constant of the plan")


def _constants(plan: Plan) -> dict[str, object]:
    """From the layers, not from the runs that the templates write, so that the two are held against each other."""
    windows = {mask.name: mask.window for mask in plan.masks}
    return {
        "FINGERPRINT": plan.fingerprint,
        "ARCHITECTURE": plan.architecture,
        "LAYERS": len(plan.steps),
        "SENTINEL": len(plan.steps),
        "CACHES": tuple(_cache(step.kind, windows[step.mask]) for step in plan.steps if not step.kind.is_reader),
        "MODEL_WEIGHTS": plan.weights,
        **{kind.weights_name: kind.weight_groups for kind in plan.kinds},
        "LAYER_WEIGHTS": tuple(step.kind.weight_groups for step in plan.steps),
        **{site.constant: Made(site.kind, tuple(value for _, value in site.arguments)) for site in plan.sites},
        **{
            each.name: Made("proportional_freqs", (each.dims, each.rotated, each.base, each.factor))
            for each in plan.freqs
        },
    }


def _cache(kind: Kind, window: int | None) -> tuple[object, ...]:
    stored = (kind.kv_bits, kind.kv_group_size) if kind.kv_bits else ()
    return (kind.attention, window, *stored)


def _evaluate(node: cst.CSTNode, names: Mapping[str, object]) -> object:
    """The value of a constant expression; of a call, what is called with which values (the rule for calls saw how)."""
    match node:
        case cst.Integer() | cst.Float() | cst.SimpleString():
            return node.evaluated_value
        case cst.UnaryOperation(expression=cst.Integer() | cst.Float() as number):
            return -number.evaluated_value
        case cst.Name(value=name) if name in BUILTINS or name in names:
            return BUILTINS[name] if name in BUILTINS else names[name]
        case cst.Call(func=cst.Name(value=function), args=items):
            return Made(function, tuple(_evaluate(item.value, names) for item in items))
        case cst.Tuple(elements=items):
            return tuple(_evaluate(item.value, names) for item in items)
        case cst.BinaryOperation(left=left, operator=operator, right=right):
            match _evaluate(left, names), operator, _evaluate(right, names):
                case tuple() as items, cst.Multiply(), int() as count if 0 < count <= MOST_REPEATS:
                    return items * count
                case tuple() as items, cst.Add(), tuple() as more:
                    return items + more
    return "an expression without a value"


def _told_apart(name: str, value: object, expected: object) -> tuple[str, str]:
    if isinstance(value, Made) and isinstance(expected, Made) and value.function == expected.function:
        value, expected = value.arguments, expected.arguments
    if isinstance(value, tuple) and isinstance(expected, tuple):
        if len(value) != len(expected):
            return f"{name} has {len(value)} items", f"{len(expected)}"
        for index, (one, other) in enumerate(zip(value, expected, strict=True)):
            if repr(one) != repr(other):
                return f"{name}[{index}] is {one!r}", repr(other)
    return f"{name} is {value!r}", repr(expected)
