"""Rules about the model: slots of weights, taps, and each line of `forward`."""

from collections.abc import Iterable, Iterator

import libcst as cst

from ..errors import listing, show
from ..plan import Plan
from .decoding import decode_bodies
from .rule import Violation, Violations
from .surface import DECODE, PER_LAYER
from .tree import Function, Tree, difference, small


def check_weights(tree: Tree, plan: Plan) -> Violations:
    functions = {function.name: function for function in tree.functions}
    for kind in plan.kinds:
        yield from _slots(
            kind.weights_name, kind.weights, (), [functions[kind.name], functions[f"{DECODE}_{kind.name}"]]
        )
    model = [function for name, function in functions.items() if name in (PER_LAYER, "forward", DECODE)]
    yield from _slots("MODEL_WEIGHTS", tuple(plan.weights.split()), ("layers",), model)


def _slots(name: str, declared: tuple[str, ...], also: tuple[str, ...], functions: list[Function]) -> Violations:
    read: set[str] = set()
    for node in (node for function in functions for node in function.nodes):
        match node:
            case cst.Attribute(value=cst.Name(value="w"), attr=cst.Name(value=slot)):
                read.add(slot)
                if slot not in (*declared, *also):
                    yield Violation(node, f"w.{slot} is read", f"a slot of {name}")
    unread = [f"w.{slot}" for slot in declared if slot not in read]
    if unread:
        what = f"{functions[-1].name} never reads {listing(unread)}"
        yield Violation(functions[-1].node, what, f"each slot of {name} to be read")


def check_taps(tree: Tree, plan: Plan) -> Violations:
    for function in tree.functions:
        if function.name in ("forward", DECODE):
            yield from _taps(function, tree, len(plan.steps))


def _taps(function: Function, tree: Tree, last: int) -> Violations:
    wanted = -1
    for node in function.nodes:
        match node:
            case cst.Call(func=cst.Name(value="tap"), args=[cst.Arg(value=index), _]):
                if tree.code(index) != str(wanted) or wanted > last:
                    expected = f"{wanted}, the next" if wanted <= last else f"none after {last}"
                    yield Violation(index, f"tap {show(tree.code(index))} stands here", expected)
                    return
                wanted += 1
    if wanted <= last:
        yield Violation(function.node, f"tap {wanted} is missing", f"each of -1 to {last} once")


def check_forward(tree: Tree, plan: Plan) -> Violations:
    yield from _compare(tree, tree.forward, _forward(plan))


def check_decode(tree: Tree, plan: Plan) -> Violations:
    bodies = decode_bodies(plan)
    for function in tree.functions:
        if function.name in bodies:
            yield from _compare(tree, function, bodies[function.name])


def _compare(tree: Tree, function: Function, body: Iterable[str]) -> Violations:
    expected = [small(line) for line in cst.parse_module("\n".join(body)).body]
    # Each ends in its only return, so a longer or shorter one differs there at the latest.
    for statement, wanted in zip(function.statements, expected, strict=False):
        pair = difference(statement.node, wanted) if wanted else None
        if wanted and pair:
            ours, theirs = (show(tree.code(node), 120) for node in pair)
            yield Violation(pair[0], f"{function.name} has {ours}", f"{theirs}, as in: {tree.code(wanted)}")


def _forward(plan: Plan) -> Iterator[str]:
    """The body of `forward`, worked out again from the kinds and their order."""
    yield "L = ids.shape[1]"
    for mask in plan.masks:
        cache = next(step.cache for step in plan.steps if f"{step.kind.attention}_mask" == mask.name)
        yield f"{mask.name} = caches[{cache}].make_mask(L, return_array=False, window_size={mask.window})"
    yield f"h = tap(-1, w.embed(ids) * {plan.embed_scale})"
    if plan.per_layer_size:
        yield f"per_layer = {PER_LAYER}(w, ids, h)"
    owners = 0
    for index, step in enumerate(plan.steps):
        kind = step.kind
        keys = f"kv{step.source}" if kind.is_reader else f"caches[{owners}]"
        owners += not kind.is_reader
        extra = f", per_layer[:, :, {index}, :]" if kind.per_layer_input else ""
        call = f"{kind.name}(w.layers[{index}], h, {kind.attention}_mask, {keys}{extra})"
        if kind.is_source:
            yield f"h, kv{index} = {call}"
        yield f"h = tap({index}, {'h' if kind.is_source else call})"
    yield f"h = tap({len(plan.steps)}, mx.fast.rms_norm(h, w.norm, {plan.eps}))"
    head = f"w.{'unembed' if plan.tied else 'lm_head'}(h)"
    yield f"return {head}" if plan.softcap is None else f"return logit_softcap({plan.softcap}, {head})"
