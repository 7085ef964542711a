"""A generated file as a tree: the nodes that mean something, their parents, the statements. Pure.

Whitespace, brackets and commas are left out by type; whatever else a libcst node may hold is walked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property

import libcst as cst

_TRIVIA = frozenset(
    {
        cst.AssignEqual,
        cst.Colon,
        cst.Comma,
        cst.Comment,
        cst.Dot,
        cst.EmptyLine,
        cst.LeftParen,
        cst.LeftSquareBracket,
        cst.Newline,
        cst.ParenthesizedWhitespace,
        cst.RightParen,
        cst.RightSquareBracket,
        cst.Semicolon,
        cst.SimpleWhitespace,
        cst.TrailingWhitespace,
    }
)
# Names that label something and are no values, such as the keyword of an argument.
_LABELS = frozenset({(cst.Attribute, "attr"), (cst.Arg, "keyword"), (cst.FunctionDef, "name"), (cst.Param, "name")})


@dataclass(frozen=True)
class Statement:
    """One line of a function: the names it binds (none if it returns), its value, and the names that it reads."""

    node: cst.Assign | cst.Return
    targets: tuple[cst.Name, ...]
    value: cst.BaseExpression
    reads: tuple[cst.Name, ...]


@dataclass(frozen=True)
class Function:
    node: cst.FunctionDef
    nodes: tuple[cst.CSTNode, ...]

    @property
    def name(self) -> str:
        return self.node.name.value

    @property
    def parameters(self) -> tuple[cst.Name, ...]:
        return tuple(parameter.name for parameter in self.node.params.params)

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(parameter.value for parameter in self.parameters)})"

    @cached_property
    def docstring(self) -> cst.SimpleString | None:
        return docstring(self.node.body.body)

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        return tuple(
            Statement(line, bound(line), line.value, tuple(names_in(line.value)))
            for line in map(small, self.node.body.body)
            if isinstance(line, (cst.Assign, cst.Return)) and line.value is not None
        )


@dataclass(frozen=True)
class Tree:
    """`source`: the text as it was given, before pruning. `parts`: the nodes of each statement, in source order."""

    source: str
    module: cst.Module
    parts: Mapping[cst.CSTNode, tuple[cst.CSTNode, ...]]
    parents: Mapping[cst.CSTNode, cst.CSTNode]

    @cached_property
    def imports(self) -> tuple[cst.Import | cst.ImportFrom, ...]:
        return tuple(line for line in map(small, self.module.body) if isinstance(line, (cst.Import, cst.ImportFrom)))

    @cached_property
    def constants(self) -> tuple[cst.Assign, ...]:
        return tuple(line for line in map(small, self.module.body) if isinstance(line, cst.Assign))

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(Function(node, nodes) for node, nodes in self.parts.items() if isinstance(node, cst.FunctionDef))

    @cached_property
    def docstring(self) -> cst.SimpleString | None:
        return docstring(self.module.body)

    @property
    def forward(self) -> Function:
        return next(function for function in self.functions if function.name == "forward")

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node).strip()


def read_tree(source: str, module: cst.Module) -> Tree:
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    parts: dict[cst.CSTNode, tuple[cst.CSTNode, ...]]
    parts = {statement: tuple(walk(statement, parents)) for statement in module.body}
    return Tree(source, module, parts, parents)


def walk(node: cst.CSTNode, parents: dict[cst.CSTNode, cst.CSTNode] | None = None) -> Iterator[cst.CSTNode]:
    """A node and all below it, in source order; notes the parents if asked to."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        below = children(node)
        if parents is not None:
            parents.update(dict.fromkeys(below, node))
        stack.extend(reversed(below))


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    found: list[cst.CSTNode] = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            if type(value) not in _TRIVIA:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if type(item) not in _TRIVIA)
    return found


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if (kind, field.name) not in _LABELS)


def names_in(node: cst.CSTNode) -> Iterator[cst.Name]:
    return (each for each in walk(node) if isinstance(each, cst.Name) and each.value not in ("None", "False", "True"))


def small(line: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """The one small statement of a line; None for a compound statement, or for several joined by `;`."""
    return line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None


def docstring(body: object) -> cst.SimpleString | None:
    match body:
        case [cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() as text)]), *_]:
            return text
    return None


def bound(line: cst.BaseSmallStatement | None) -> tuple[cst.Name, ...]:
    """The names that an assignment binds; none if it binds anything else, or is no assignment."""
    match line:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name() as name)]):
            return (name,)
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Tuple(elements=elements))]):
            names = tuple(element.value for element in elements if isinstance(element.value, cst.Name))
            return names if len(names) == len(elements) else ()
    return ()


def callee(function: cst.BaseExpression) -> str:
    """What is called, with `_` for any value that is not one of the known handles."""
    match function:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=cst.Name(value="mx" | "w" | "cache" as name), attr=cst.Name(value=attribute)):
            return f"{name}.{attribute}"
        case cst.Attribute(
            value=cst.Attribute(value=cst.Name(value="mx"), attr=cst.Name(value=group)), attr=cst.Name(value=attribute)
        ):
            return f"mx.{group}.{attribute}"
        case cst.Attribute(value=cst.Subscript(value=cst.Name(value="caches")), attr=cst.Name(value=attribute)):
            return f"caches[_].{attribute}"
        case cst.Attribute(attr=cst.Name(value=attribute)):
            return f"_.{attribute}"
    return "_"


def difference(ours: cst.CSTNode, theirs: cst.CSTNode) -> tuple[cst.CSTNode, cst.CSTNode] | None:
    """The first pair of nodes that differ in more than layout."""
    here, there = children(ours), children(theirs)
    if type(ours) is not type(theirs) or _word(ours) != _word(theirs) or len(here) != len(there):
        return ours, theirs
    return next(filter(None, map(difference, here, there)), None)


def _word(node: cst.CSTNode) -> str:
    match node:
        case cst.Name(value=word) | cst.Integer(value=word) | cst.Float(value=word) | cst.SimpleString(value=word):
            return word
        case cst.Attribute(attr=cst.Name(value=word)) | cst.Arg(keyword=cst.Name(value=word)):
            return word
    return ""
