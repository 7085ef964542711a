"""The sides of a race: mlx-lm's model, what a call of the specialized model runs, and the file's `forward` by itself.

Each side fills and owns its caches, as its users' code would make them.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from .. import decoding
from ..arrays import copied
from ..kv import make_cache, with_stand_ins
from ..model import text_model
from ..monolith import call_text_model
from ..taps import HiddenTap, no_tap
from .cells import CHUNK, Cell
from .models import Pair

MLX_LM, CONTROL, FORWARD, STRAIGHTLINE, OVERLAPPED = "mlx-lm", "mlx-lm again", "forward", "straightline", "overlapped"
Call = Callable[[mx.array, list[Any], HiddenTap | None], mx.array]
Loop = Callable[[mx.array, int], Iterator[tuple[int, mx.array]]]


@dataclass(frozen=True)
class Side:
    """call: token ids [B, L], caches, a tap or None, to logits [B, L, vocabulary]. caches: new ones, for `call`.

    loop: a prompt [N] and a count, to so many tokens and their log-probabilities; None for a side without one.
    """

    name: str
    call: Call
    caches: Callable[[], list[Any]]
    loop: Loop | None = None
    loop_only: bool = False

    def takes(self, cell: Cell) -> bool:
        return self.loop is not None if cell.loop else not self.loop_only


def sides(pair: Pair, forward: bool = False, control: bool = False, overlapped: bool = False) -> list[Side]:
    """mlx-lm first. forward: the generated file's entry for any width as a side of its own, decoding included.

    control: mlx-lm a second time. overlapped: straightline's loop with its second thread, in the cells of loops.
    """
    model, oracle = pair.model, pair.oracle
    found = [
        Side(
            MLX_LM,
            _mlx_lm(oracle),
            lambda: _stood_in(pair),
            lambda prompt, count: generate_step(prompt, oracle, max_tokens=count),
        )
    ]
    if control:
        found.append(replace(found[0], name=CONTROL))
    if forward:
        found.append(Side(FORWARD, _forward(model), lambda: make_cache(model, pair.kv_config)))
    found.append(
        Side(
            STRAIGHTLINE,
            lambda ids, caches, tap: model(ids, cache=caches, tap=tap),
            lambda: make_cache(model, pair.kv_config),
            _loop(model, overlap=False),
        )
    )
    if overlapped:
        found.append(replace(found[-1], name=OVERLAPPED, loop=_loop(model, overlap=True), loop_only=True))
    return found


@contextmanager
def blamed(side: Side) -> Iterator[None]:
    """An error that leaves this block has the name of the side as its note."""
    try:
        yield
    except Exception as error:
        error.add_note(side.name)
        raise


def _mlx_lm(oracle: Any) -> Call:
    text, sentinel = text_model(oracle), len(oracle.layers)

    def call(ids: mx.array, caches: list[Any], tap: HiddenTap | None) -> mx.array:
        if tap is None:
            logits: mx.array = oracle(ids, cache=caches)
            return logits
        return call_text_model(text, ids, tap.begin(sentinel, ids.shape[1]), cache=caches)

    return call


def _stood_in(pair: Pair) -> list[Any]:
    """mlx-lm's own caches; where K/V are quantized, straightline's, which mlx-lm's forward takes too."""
    if pair.kv_config is None:
        own: list[Any] = pair.oracle.make_cache()
        return own
    made = with_stand_ins(make_cache(pair.oracle, pair.kv_config), text_model(pair.oracle)["model"].previous_kvs)
    return list(made)


def _loop(model: Any, overlap: bool) -> Loop:
    return lambda prompt, count: decoding.generate_step(prompt, model, max_tokens=count, overlap=overlap)


def _forward(model: Any) -> Call:
    def call(ids: mx.array, caches: list[Any], tap: HiddenTap | None) -> mx.array:
        bound = model._bound
        route, reason = bound.route(caches)
        if route is None:
            raise ValueError(reason)
        hook = no_tap if tap is None else tap.begin(bound.sentinel, ids.shape[1])
        logits: mx.array = route.forward(bound.weights, ids, caches, hook)
        return logits

    return call


def read_prompt(side: Side, ids: mx.array, caches: list[Any], tap: HiddenTap | None = None) -> mx.array:
    """The logits [B, 1, vocabulary] of the last of the ids [B, N], by mlx_lm.generate's way: in chunks, then one token.

    Evaluated, and so are the caches and what was tapped of each chunk.
    """
    before = ids.shape[1] - 1
    fill(side, ids[:, :before], caches, tap)
    logits = side.call(ids[:, before:], caches, tap)
    mx.eval(logits, states(caches), _kept(tap))
    return logits


def fill(side: Side, ids: mx.array, caches: list[Any], tap: HiddenTap | None = None) -> None:
    """The ids [B, N] in chunks, for what they leave in the caches."""
    for start in range(0, ids.shape[1], CHUNK):
        side.call(ids[:, start : start + CHUNK], caches, tap)
        mx.eval(states(caches), _kept(tap))


def with_own_arrays(caches: list[Any]) -> list[Any]:
    """Copies: a side may write into its caches in place."""
    copies = copy.deepcopy(caches)
    for cache in copies:
        for part in [cache, *getattr(cache, "parts", [])]:
            for name, value in vars(part).items():
                if isinstance(value, mx.array):
                    setattr(part, name, copied(value))
    mx.eval(states(copies))
    return copies


def states(caches: list[Any]) -> list[Any]:
    return [cache.state for cache in caches if hasattr(cache, "state")]


def _kept(tap: HiddenTap | None) -> list[mx.array]:
    return [] if tap is None else list(tap.captured.values())
