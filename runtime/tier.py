"""The tiers. "exact": mlx-lm's bits. "fast": where something of ours is faster and closer to float64, but not equal.

What the fast tier changes is the attention of single tokens. All else in `decode` keeps the exact tier's bits, which
are checked before; here only the attention is, on the model's own tokens, against the result in float32.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx

from .decode_check import fill
from .errors import StraightlineError
from .evaluation import evaluate
from .in_place import Lease, over_whole_buffers
from .kernels import Attention, Call, FastAttention, Site, faster
from .kernels.fast_check import BOUND, distance, reference
from .taps import no_tap

TIERS = ("exact", "fast")
PROMPT = 5
STEPS = 2
States = dict[str, tuple[str, str]]


def check_tier(tier: object) -> None:
    if tier not in TIERS:
        raise StraightlineError(f'tier is {tier!r}; expected "exact" (mlx-lm\'s bits) or "fast"')


def sites_of(file: ModuleType) -> dict[str, Site]:
    """The fused sites of a generated file, by the names that its `decode` calls them by."""
    return {name.lower(): site for name, site in vars(file).items() if isinstance(site, Site)}


def fast_route(route: Any, sites: dict[str, Site], dtype: mx.Dtype) -> tuple[Any, States]:
    """The route with the attention of the fast tier, and of each ("fast" or "exact", what was measured or why)."""
    attention, states = faster(sites, dtype)
    if not states:
        return route, {"attention": ("exact", "over quantized K/V the generated file calls MLX's own operations")}
    if not attention:
        return route, states
    calls = SimpleNamespace(**(vars(route.sites) | attention))
    in_place = None
    if route.in_place is not None:
        whole, _ = faster(sites, dtype, whole=True)
        # Slots show buffers in one way to all layers.
        in_place = over_whole_buffers(route.in_place, whole) if len(whole) == len(states) else None
    return route._replace(sites=calls, in_place=in_place, whole=in_place is not None), states


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
    watch = Watch(route.sites, sites)
    ids = mx.array([[index % vocabulary for index in range(PROMPT)]])
    if not evaluate(route.forward(weights, ids, caches, no_tap)):
        return "nothing can be compared inside mx.compile"
    logits = [route.decode(weights, watch.calls, ids[:, step : step + 1], caches, no_tap) for step in range(STEPS)]
    return watch.refused(logits)


def _in_place(weights: Any, route: Any, sites: dict[str, Site], caches: list[Any], vocabulary: int) -> str:
    watch = Watch(route.in_place.moving, sites)
    mx.eval(route.forward(weights, mx.array([[1 % vocabulary]]), caches, no_tap))
    fill(caches)
    lease, logits = Lease(caches, route, whole=True), []
    for step in range(STEPS):
        token = mx.array([[step % vocabulary]])
        slots, compiled = lease.begin(route.in_place)
        logits += [route.decode(weights, calls, token, slots, no_tap) for calls in (watch.calls, compiled)]
        lease.end(logits[-1])
        if not mx.array_equal(*logits[-2:]).item():
            return f"compiled layers give other logits at step {step}"
    return watch.refused(logits)


class Watch:
    """calls: those of a route, each attention measured as it runs, against the result in float32."""

    def __init__(self, calls: SimpleNamespace, sites: dict[str, Site]) -> None:
        self.errors: list[mx.array] = []
        attention = {name: site for name, site in sites.items() if isinstance(site, Attention)}
        watched = {name: self._watched(getattr(calls, name), site) for name, site in attention.items()}
        self.calls = SimpleNamespace(**(vars(calls) | watched))

    def _watched(self, call: Call, site: Attention) -> Call:
        fast = FastAttention(site.heads, site.kv_heads, site.head_dim)

        def attention(q: mx.array, k: mx.array, v: Any) -> mx.array:
            # Rows that are written in place are there once q is, and MLX does not know.
            mx.eval(q)
            found: mx.array = call(q, k, v)
            self.errors.append(distance(found, reference(fast, q, k, *(v if type(v) is tuple else (v,)))))
            return found

        return attention

    def refused(self, logits: list[mx.array]) -> str:
        if not mx.isfinite(mx.concatenate(logits).astype(mx.float32)).all().item():
            return "its logits are not finite"
        error: Any = mx.stack(self.errors).max().item()
        if error <= BOUND:
            return ""
        return f"its error on this model's own tokens is {error:.1e}, above the bound {BOUND:.1e}"
