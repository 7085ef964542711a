"""Rules about the model: slots of weights, taps, and each line of `forward`."""

from collections.abc import Iterable, Iterator, Sequence

import libcst as cst

from ..errors import listing, show
from ..plan import Plan
from .decoding import decode_bodies
from .reach import ONE_TOKEN
from .rule import Violation, Violations
from .surface import DECODE, PER_LAYER
from .tree import Function, Tree, difference, small


def check_weights(tree: Tree, plan: Plan) -> Violations:
    functions = {function.name: function for function in tree.functions}
    for kind in plan.kinds:
        for_any, for_one = functions[kind.name], functions[f"{DECODE}_{kind.name}"]
        yield from _slots(kind.weights_name, kind.weights, (), [for_any], [for_one])
    for_any_width = [function for name, function in functions.items() if name in (PER_LAYER, "forward")]
    yield from _slots("MODEL_WEIGHTS", plan.weights.split(), ("layers",), for_any_width, [functions[DECODE]])


def _slots(
    name: str, declared: Sequence[str], also: Sequence[str], for_any: list[Function], for_one: list[Function]
) -> Violations:
    """Slots of one token's own are read there and there alone; the rule for its functions sees to the others."""
    own = [slot for slot in declared if slot in ONE_TOKEN]
    common = [slot for slot in declared if slot not in ONE_TOKEN]
    yield from _reads(name, for_any, (*common, *also), common)
    yield from _reads(name, for_one, (*declared, *also), own)


def _reads(name: str, functions: list[Function], allowed: Sequence[str], needed: Sequence[str]) -> Violations:
    read: set[str] = set()
    for node in (node for function in functions for node in function.nodes):
        match node:
            case cst.Attribute(value=cst.Name(value="w"), attr=cst.Name(value=slot)):
                read.add(slot)
                if slot not in allowed:
                    yield Violation(node, f"w.{slot} is read", f"a slot of {name}")
    unread = [f"w.{slot}" for slot in needed if slot not in read]
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
