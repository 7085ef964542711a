"""The tiers. "exact": mlx-lm's bits. "fast": where something of ours is faster and closer to float64, but not equal.

What the fast tier changes is the attention of single tokens. All else in `decode` keeps the exact tier's bits, which
are checked before; here only the attention is, on the model's own tokens, against the result in float32.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from ..codegen.spec import Quantized
from .arrays import same_bits
from .decode_check import PROMPT, STEPS, fill
from .errors import StraightlineError
from .evaluation import evaluate
from .in_place import Lease, over_whole_buffers
from .kernels import Attention, Call, FastAttention, QKVRope, Site, faster
from .kernels.fast_check import BOUND, distance, reference
from .kernels.fast_resolve import resolve_fast
from .packed import PackedRows
from .taps import no_tap

TIERS = ("exact", "fast")
States = dict[str, tuple[str, str]]


def check_tier(tier: object) -> None:
    if tier not in TIERS:
        raise StraightlineError(f'tier is {tier!r}; expected "exact" (mlx-lm\'s bits) or "fast"')


def fast_route(
    route: Any, sites: dict[str, Site], caches: tuple[tuple[Any, ...], ...], dtype: mx.Dtype
) -> tuple[Any, States]:
    """The route with the attention of the fast tier, and of each ("fast" or "exact", what was measured or why).

    caches: the file's CACHES.
    """
    attention, states = faster(sites, dtype)
    packed, more = _over_packed(route, sites, caches, dtype)
    if not attention and not packed:
        return route, states | more
    calls = SimpleNamespace(**(vars(route.sites) | attention | packed))
    in_place = None
    if route.in_place is not None:
        whole, _ = faster(sites, dtype, whole=True)
        # Slots show buffers in one way to all layers.
        in_place = over_whole_buffers(route.in_place, whole) if len(whole) == len(states) else None
    return route._replace(sites=calls, in_place=in_place, whole=in_place is not None), states | more


def _over_packed(
    route: Any, sites: dict[str, Site], caches: tuple[tuple[Any, ...], ...], dtype: mx.Dtype
) -> tuple[dict[str, Call], States]:
    """For each kind of layer with quantized K/V, a call that gives rows as they are stored, to be attended to so."""
    calls, states = {}, {}
    for name, site in sites.items():
        if not isinstance(site, QKVRope) or not site.kv_heads:
            continue
        kind, attention = name.removesuffix("_qkv"), {}
        for stored in sorted({one[2:] for one in caches if one[0] == kind and len(one) == 4}):
            fast = FastAttention(site.heads, site.kv_heads, site.head_dim, *stored)
            found = resolve_fast(fast, dtype)
            state = "exact" if found.call is None else "fast"
            states[f"{kind}_attention, {stored[0]} bits in groups of {stored[1]}"] = state, found.reason
            if found.call is not None:
                attention[Quantized(*stored)] = found.call, fast
        if attention:
            calls[name] = _storing_packed(getattr(route.sites, name).projected, attention)
    return calls, states


def _storing_packed(call: Call, attention: dict[Quantized, tuple[Call, FastAttention]]) -> Call:
    def qkv(cache: Any, *inputs: mx.array) -> tuple[Any, ...]:
        q, k, v = call(*inputs)
        attend = attention.get(getattr(cache, "stored", None))  # type: ignore[arg-type]
        if attend is None:
            return q, *cache.update_and_fetch(k, v)
        k, v = cache.update_packed(k, v)
        return q, PackedRows.of(k, *attend), v

    return qkv


def fast_refused(
    weights: Any, route: Any, sites: dict[str, Site], make_caches: Callable[[], list[Any]], vocabulary: int
) -> str:
    """Why the fast attention is not to be used with this model; empty if it is within its bound at every call.

    Two tokens after five; where it writes in place, two more over rings that wrap, and compiled layers as not compiled.
    This is the check of this tier in place of `decode` equal to `forward`, which it is not.
    """
    try:
        return _over_caches(weights, route, sites, make_caches(), vocabulary) or (
            _in_place(weights, route, sites, make_caches(), vocabulary) if route.whole else ""
        )
    except (RuntimeError, ValueError) as error:
        return f"it fails here: {error}"


def _over_caches(weights: Any, route: Any, sites: dict[str, Site], caches: list[Any], vocabulary: int) -> str:
    measured = Measured(route.sites, sites)
    ids = mx.array([[index % vocabulary for index in range(PROMPT)]])
    if not evaluate(route.forward(weights, ids, caches, no_tap)):
        return "nothing can be compared inside mx.compile"
    tokens = (ids[:, step : step + 1] for step in range(STEPS))
    return measured.refused([route.decode(weights.single, measured.calls, one, caches, no_tap) for one in tokens])


def _in_place(weights: Any, route: Any, sites: dict[str, Site], caches: list[Any], vocabulary: int) -> str:
    measured = Measured(route.in_place.moving, sites)
    mx.eval(route.forward(weights, mx.array([[1 % vocabulary]]), caches, no_tap))
    fill(caches)
    lease, logits = Lease(caches, route.guard, whole=True), []
    for step in range(STEPS):
        token = mx.array([[step % vocabulary]])
        slots, compiled = lease.begin(route.in_place)
        logits.append(route.decode(weights.single, compiled, token, slots, no_tap))
        mx.eval(logits)  # before the watched calls write to the same rows
        logits.append(route.decode(weights.single, measured.calls, token, slots, no_tap))
        lease.end(logits[-1])
        if not same_bits(*logits[-2:]):
            return f"compiled layers give other logits at step {step}"
    return measured.refused(logits)


class Measured:
    """calls: those of a route, each attention measured as it runs, against the result in float32."""

    def __init__(self, calls: SimpleNamespace, sites: dict[str, Site]) -> None:
        self.errors: list[mx.array] = []
        watched = {}
        for name, site in sites.items():
            if isinstance(site, Attention):
                fast = FastAttention(site.heads, site.kv_heads, site.head_dim)
                watched[name] = self._watched(getattr(calls, name), fast)
            elif isinstance(site, QKVRope) and site.kv_heads:
                watched[name] = self._watched_rows(getattr(calls, name))
        self.calls = SimpleNamespace(**(vars(calls) | watched))

    def _watched_rows(self, call: Call) -> Call:
        def qkv(*inputs: Any) -> tuple[Any, ...]:
            q, k, v = call(*inputs)
            if type(k) is PackedRows:
                k = PackedRows.of(k, self._watched(k.attention, k.site), k.site)
            return q, k, v

        return qkv

    def _watched(self, call: Call, fast: FastAttention) -> Call:
        def attention(q: mx.array, k: mx.array, v: Any) -> mx.array:
            # Rows that are written in place are there once q is, and MLX does not know.
            mx.eval(q)
            found: mx.array = call(q, k, v)
            rest = v if type(v) is tuple and not fast.bits else (v,)  # with the number of rows, where it is in place
            self.errors.append(distance(found, reference(fast, q, k, *rest)))
            return found

        return attention

    def refused(self, logits: list[mx.array]) -> str:
        if not mx.isfinite(mx.concatenate(logits).astype(mx.float32)).all().item():
            return "its logits are not finite"
        error: Any = mx.stack(self.errors).max().item()
        if error <= BOUND:
            return ""
        return f"its error on this model's own tokens is {error:.1e}, above the bound {BOUND:.1e}"
