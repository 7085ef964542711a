"""The rule about names: bound before use in straight-line order, read after they are bound, never bound over."""

from collections.abc import Container, Iterable, Iterator, Mapping

import libcst as cst

from ..errors import show
from ..plan import Plan
from .rule import Violation, Violations
from .surface import is_decode
from .tree import Function, Tree, bound, names_in

PUBLIC = frozenset(
    {
        *("FINGERPRINT", "ARCHITECTURE", "LAYERS", "SENTINEL"),
        *("CACHES", "MODEL_WEIGHTS", "LAYER_WEIGHTS", "forward", "decode"),
    }
)


def check_names(tree: Tree, plan: Plan) -> Violations:
    known: dict[str, cst.CSTNode] = {}
    used: set[str] = set()
    # Of constants and functions, the functions that are not worked out again line by line see these alone.
    shown = {freqs.name for freqs in plan.freqs}
    for name, place, source in _bindings(tree):
        if name in known:
            yield Violation(place, f"{name} is bound again", "each name of the module to be bound once")
        if isinstance(source, Function):
            whole = source.name == "forward" or is_decode(source.node)
            yield from _forwards(source, known, known.keys() if whole else shown)
            yield from _backwards(source)
            reads = {read.value for statement in source.statements for read in statement.reads} | _sites_of(source)
        else:
            loads = list(names_in(source)) if source else []
            yield from _undefined(loads, known)
            reads = {load.value for load in loads}
        if source is None:
            shown.add(name)
        used |= reads
        known[name] = place
    for name, place in known.items():
        if name not in used and name not in PUBLIC:
            yield Violation(place, f"{name} is never used", "every name to be used")


def _bindings(tree: Tree) -> Iterator[tuple[str, cst.CSTNode, cst.CSTNode | Function | None]]:
    """Each name that the module binds, where, and to what."""
    for line in tree.imports:
        for alias in () if isinstance(line.names, cst.ImportStar) else line.names:
            yield alias.evaluated_alias or alias.evaluated_name, alias.name, None
    for constant in tree.constants:
        (target,) = bound(constant)
        yield target.value, target, constant.value
    for function in tree.functions:
        yield function.name, function.node, function


def _sites_of(function: Function) -> set[str]:
    """The constants of the fused sites that a function calls: `s.layer_end` is LAYER_END."""
    return {
        node.attr.value.upper()
        for node in function.nodes
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "s"
    }


def _undefined(reads: Iterable[cst.Name], names: Container[str]) -> Violations:
    for read in reads:
        if read.value not in names:
            yield Violation(read, f"{show(read.value)} is not bound here", "a name that is bound further up")


def _forwards(function: Function, known: Mapping[str, object], shown: Iterable[str]) -> Violations:
    names = {*shown, *(parameter.value for parameter in function.parameters)}
    targets = [target for statement in function.statements for target in statement.targets]
    for name in (*function.parameters, *targets):
        if name.value in known:
            yield Violation(name, f"{name.value} hides a name of the module", "a name of its own")
    for statement in function.statements:
        yield from _undefined(statement.reads, names)
        names |= {target.value for target in statement.targets} - {"_"}


def _backwards(function: Function) -> Violations:
    awaited: set[str] = set()
    for statement in reversed(function.statements):
        targets = {target.value for target in statement.targets}
        # `_` stands for a part that is not needed. Only `decode` has a whole one, and is worked out again.
        idle = targets != {"_"} or is_decode(function.node)
        for target in statement.targets:
            if target.value not in awaited and (target.value != "_" or not idle):
                yield Violation(target, f"{target.value} is bound and not read", "each value to be read")
        awaited = awaited - targets | {read.value for read in statement.reads}
    for parameter in function.parameters:
        if parameter.value not in awaited:
            yield Violation(parameter, f"{function.name} never reads {parameter.value}", "each parameter to be read")
