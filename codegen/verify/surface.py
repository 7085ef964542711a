"""Rules about what a file shows: its imports, its functions with their parameters, its docstrings."""

from inspect import cleandoc

import libcst as cst

from ..errors import listing, show
from ..plan import Plan
from .rule import START, Place, Violation, Violations
from .tree import Tree

OPS_MODULE = "straightline.runtime.ops"
OPS = ("geglu", "gelu_approx", "logit_softcap", "proportional_freqs", "quantized_attention", "scaled_add")
KERNELS_MODULE = "straightline.runtime.kernels"
SITES = ("Attention", "DualResidualNorms", "Geglu", "PerLayerGate", "QKVRope", "ResidualNorms", "Router")
IMPORTED = {OPS_MODULE: OPS, KERNELS_MODULE: SITES}
PER_LAYER = "per_layer_inputs"
DECODE = "decode"


def is_decode(part: cst.CSTNode) -> bool:
    """Whether this is one of the functions for one token, whose every statement the rule for them works out again."""
    return isinstance(part, cst.FunctionDef) and (part.name.value == DECODE or part.name.value.startswith(f"{DECODE}_"))


def check_imports(tree: Tree, plan: Plan) -> Violations:
    for line in tree.imports:
        match line:
            case cst.Import() if tree.code(line) == "import mlx.core as mx":
                pass
            case cst.ImportFrom(module=cst.Attribute() as module, relative=[], names=[*names]) if (
                tree.code(module) in IMPORTED
            ):
                known = IMPORTED[tree.code(module)]
                for alias in names:
                    if alias.asname or alias.evaluated_name not in known:
                        yield Violation(alias.name, f"{show(_alias(alias))} is imported", f"any of {listing([*known])}")
            case _:
                expected = f"import mlx.core as mx, or names from {' or '.join(IMPORTED)}"
                yield Violation(line, f"{show(tree.code(line))} is here", expected)


def _alias(alias: cst.ImportAlias) -> str:
    return f"{alias.evaluated_name} as {alias.evaluated_alias}" if alias.asname else alias.evaluated_name


def signatures(plan: Plan) -> tuple[str, ...]:
    """The functions of the file, in order."""
    kinds = tuple(f"{kind.name}({kind.parameters})" for kind in plan.kinds)
    per_layer = (f"{PER_LAYER}(w, ids, h)",) if plan.per_layer_size else ()
    decode_kinds = tuple(f"{DECODE}_{kind.name}({kind.decode_parameters})" for kind in plan.kinds)
    return (*kinds, *per_layer, "forward(w, ids, caches, tap)", *decode_kinds, f"{DECODE}(w, s, ids, caches, tap)")


def check_functions(tree: Tree, plan: Plan) -> Violations:
    expected = signatures(plan)
    for number, function in enumerate(tree.functions):
        wanted = expected[number] if number < len(expected) else "no further function"
        if function.signature != wanted:
            yield Violation(function.node, f"{show(function.signature, 120)} is defined", wanted)
    for signature in expected[len(tree.functions) :]:
        yield Violation(START, f"{signature} is absent", "each function of the plan")


def check_docstrings(tree: Tree, plan: Plan) -> Violations:
    expected = _docstrings(plan)
    places: list[tuple[cst.SimpleString | None, Place, str, str]] = [(tree.docstring, START, "the file", plan.title)]
    places += [(each.docstring, each.node, each.name, expected[each.name]) for each in tree.functions]
    for text, place, name, wanted in places:
        value = text.evaluated_value if text else None
        if not isinstance(value, str) or cleandoc(value) != wanted:
            yield Violation(text or place, f"the docstring of {name} is not the plan's", show(wanted, 200))


def _docstrings(plan: Plan) -> dict[str, str]:
    return {
        **{kind.name: f"{kind.title}\n\n{kind.details}" for kind in plan.kinds},
        **{f"{DECODE}_{kind.name}": kind.decode_title for kind in plan.kinds},
        DECODE: "forward for one token [1, 1] and caches that need no mask, all at one position: "
        "fewer primitives, same bits.",
        PER_LAYER: "One extra input for each layer, from the ids and from the embedding: "
        f"[B, L, {plan.layers}, {plan.per_layer_size}].",
        "forward": f"Token ids [B, L] to logits [B, L, {plan.vocab_size}]; any L. "
        f"Taps: -1 the scaled embedding, 0-{plan.layers - 1} the layers, {plan.sentinel} the norm.",
    }
