"""The rule about the title: its counts of layers are those of the lines of `forward`. Asks the plan nothing."""

import re
from collections.abc import Iterator

import libcst as cst

from ..plan import Plan
from .rule import START, Violation, Violations
from .tree import Function, Tree, callee

CLAIM = re.compile(
    r"[a-z0-9-]+: (?P<layers>\d+) layers? \((?P<sliding>\d+) sliding, (?P<full>\d+) full\), "
    r"(?:no KV sharing|(?P<readers>\d+) share the KV of layers (?P<sources>[\d, -]+)), "
    r"(?:no experts|\d+ experts, (?P<top_k>\d+) a token)"
    r"(?:, (?P<quantized>\d+) of (?P<caches>\d+) caches quantized)?\."
)
NOUNS = {
    "readers": "readers of another layer's KV",
    "sources": "layers whose KV is read",
    "top_k": "experts a token",
    "quantized": "quantized caches",
}


def check_claim(tree: Tree, plan: Plan) -> Violations:
    title = tree.docstring
    claim = CLAIM.fullmatch(str(title.evaluated_value)) if title else None
    if title is None or claim is None:
        yield Violation(title or START, "the title makes no claim", "counts of layers, KV sharing and experts")
        return
    claimed = {name: value or "" for name, value in claim.groupdict().items()}
    claimed["sources"] = _spread(claimed["sources"])
    for name, counted in _count(tree).items():
        if claimed[name] != counted:
            what = f"the title claims {claimed[name] or 'no'} {NOUNS.get(name, name)}"
            yield Violation(title, what, f"{counted or 'none'}, as in the code")


def _count(tree: Tree) -> dict[str, str]:
    layers = [(callee(call.func), call.args) for call in _layer_calls(tree.forward)]
    windows = _windows(tree.forward, tree)
    sliding = sum(windows[tree.code(arguments[2].value)] != "None" for _, arguments in layers)
    keys = [(name, tree.code(arguments[3].value)) for name, arguments in layers]
    owners = [name for name, key in keys if key.startswith("caches[")]
    read = [key.removeprefix("kv") for _, key in keys if not key.startswith("caches[")]
    quantized = {function.name for function in tree.functions if _calls(function, "quantized_attention")}
    stored = sum(name in quantized for name in owners)
    return {
        "layers": str(len(layers)),
        "sliding": str(sliding),
        "full": str(len(layers) - sliding),
        "readers": str(len(read) or ""),
        "sources": ", ".join(sorted(set(read), key=int)),
        "top_k": next((top_k for function in tree.functions for top_k in _top_k(function, tree)), ""),
        "quantized": str(stored or ""),
        "caches": str(len(owners) if stored else ""),
    }


def _calls(function: Function, name: str) -> bool:
    return any(isinstance(node, cst.Call) and callee(node.func) == name for node in function.nodes)


def _layer_calls(forward: Function) -> Iterator[cst.Call]:
    """The calls whose first argument is `w.layers[_]`."""
    for node in forward.nodes:
        match node:
            case cst.Call(args=[cst.Arg(value=cst.Subscript(value=cst.Attribute())), _, _, _, *_]):
                yield node


def _windows(forward: Function, tree: Tree) -> dict[str, str]:
    """The window of each mask, as it is spelled."""
    windows = {}
    for statement in forward.statements:
        match statement.value:
            case cst.Call(func=cst.Attribute(attr=cst.Name(value="make_mask")), args=[*_, window]):
                windows[statement.targets[0].value] = tree.code(window.value)
    return windows


def _top_k(function: Function, tree: Tree) -> Iterator[str]:
    for node in function.nodes:
        match node:
            case cst.Arg(keyword=cst.Name(value="kth"), value=value):
                yield tree.code(value).removeprefix("-")


def _spread(ranges: str) -> str:
    """`3, 5-7` as `3, 5, 6, 7`."""
    numbers: list[int] = []
    for part in filter(None, ranges.split(", ")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return ", ".join(map(str, numbers))
