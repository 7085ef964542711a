"""The last check of a generated file, and the gate for what a stranger's config may bring about. Pure.

Takes rendered source, drops the imports it does not use, and returns it only if it keeps every rule of RULES.
"""

from itertools import repeat
from typing import NamedTuple

import libcst as cst
from libcst.metadata import CodePosition, MetadataWrapper, PositionProvider

from ..errors import SpecError
from ..plan import Plan
from .rule import Place, Rule, Violation
from .rules import RULES
from .surface import IMPORTED
from .tree import Tree, read_tree, small, walk

__all__ = ["RULES", "first_violation", "prune", "refusal", "verify"]


class Found(NamedTuple):
    rule: Rule
    violation: Violation
    where: CodePosition


def verify(source: str, plan: Plan) -> str:
    try:
        tree = read_tree(source, cst.parse_module(source))
        pruned = prune(tree)
        found = first_violation(pruned, tree, plan)
        if found:
            raise refusal(found.where, found.violation.what, found.violation.expected)
        return pruned.module.code
    except cst.ParserSyntaxError as error:
        where = CodePosition(error.raw_line, error.raw_column)
        raise refusal(where, "this is not Python", "what the templates lay out") from None
    except RecursionError:
        raise refusal(CodePosition(1, 0), "an expression is nested too deeply to be checked", "fewer layers") from None


def refusal(where: CodePosition, what: str, expected: str) -> SpecError:
    """Columns count from 0 in libcst, from 1 in every editor."""
    return SpecError(f"generated source, line {where.line} column {where.column + 1}: {what}; expected {expected}")


def prune(tree: Tree) -> Tree:
    """The tree without the names that the file imports from the runtime and does not use."""
    others = (node for line, nodes in tree.parts.items() if small(line) not in tree.imports for node in nodes)
    used = {node.value for node in others if isinstance(node, cst.Name)}
    for statement in tree.imports:
        if not isinstance(statement, cst.ImportFrom) or isinstance(statement.names, cst.ImportStar):
            continue
        if statement.relative or statement.module is None or tree.code(statement.module) not in IMPORTED:
            continue
        kept = [alias for alias in statement.names if alias.evaluated_name in used]
        if len(kept) < len(statement.names):
            return prune(read_tree(tree.source, _narrowed(tree.module, statement, kept)))
    return tree


def _narrowed(module: cst.Module, statement: cst.ImportFrom, kept: list[cst.ImportAlias]) -> cst.Module:
    """The module with one import narrowed to `kept`, or without it. All other nodes stay the same objects."""
    lines = [line for line in module.body if kept or small(line) is not statement]
    if kept:
        names = [*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
        narrowed = statement.with_changes(names=names)
        lines = [line.with_changes(body=[narrowed]) if small(line) is statement else line for line in lines]
    return module.with_changes(body=lines)


def first_violation(pruned: Tree, original: Tree, plan: Plan) -> Found | None:
    """The first rule that is broken, at the first place where it is. Places are those of the text as it was given."""
    for rule in RULES:
        violations = list(rule.check(pruned, plan))
        if violations:
            places = _locate([violation.place for violation in violations], original.module)
            found = map(Found, repeat(rule), violations, places)
            return min(found, key=lambda one: (one.where.line, one.where.column))
    return None


def _locate(places: list[Place], module: cst.Module) -> list[CodePosition]:
    """Positions are costly, so they are worked out only for a file that is refused."""
    positions = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    return [
        (
            CodePosition(*place)
            if isinstance(place, tuple)
            else positions[place if place in positions else _original(place, module)].start
        )
        for place in places
    ]


def _original(place: cst.CSTNode, module: cst.Module) -> cst.CSTNode:
    """The line of an import that pruning has narrowed: all that is left of it is the node that names its module."""
    kept = set(walk(place))
    lines = ((line, small(line)) for line in module.body)
    return next((line for line, node in lines if isinstance(node, cst.ImportFrom) and node.module in kept), module)
