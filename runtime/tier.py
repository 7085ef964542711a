"""The tiers. "exact": mlx-lm's bits. "fast": where something of ours is faster and closer to float64, but not equal.

What the fast tier changes is the attention of single tokens. All else in `decode` keeps the exact tier's bits, which
are checked before; here only the attention is, on the model's own tokens, against the result in float32.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx

from .errors import StraightlineError
from .evaluation import evaluate
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


def fast_sites(sites: dict[str, Site], exact: SimpleNamespace, dtype: mx.Dtype) -> tuple[SimpleNamespace, States]:
    """The calls of `decode` in the fast tier, and for each attention ("fast" or "exact", what was measured or why)."""
    calls, states = faster(sites, vars(exact), dtype)
    if not states:
        states = {"attention": ("exact", "over quantized K/V the generated file calls MLX's own operations")}
    return SimpleNamespace(**calls), states


def fast_refused(
    weights: Any,
    forward: Callable[..., mx.array],
    decode: Callable[..., mx.array],
    sites: dict[str, Site],
    calls: SimpleNamespace,
    make_caches: Callable[[], list[Any]],
    vocabulary: int,
) -> str:
    """Why the fast attention is not to be used with this model; empty if it is within its bound at every call.

    Two tokens after five. This is the check of this tier in place of `decode` equal to `forward`, which it is not.
    """
    worst: list[mx.array] = []
    observed = {
        name: _observed(calls, name, site, worst) for name, site in sites.items() if isinstance(site, Attention)
    }
    watched = SimpleNamespace(**(vars(calls) | observed))
    caches = make_caches()
    ids = mx.array([[index % vocabulary for index in range(PROMPT)]])
    try:
        if not evaluate(forward(weights, ids, caches, no_tap)):
            return "nothing can be compared inside mx.compile"
        for step in range(STEPS):
            logits = decode(weights, watched, ids[:, step : step + 1], caches, no_tap)
            if not mx.isfinite(logits.astype(mx.float32)).all().item():
                return f"its logits are not finite at step {step}"
        error: Any = mx.stack(worst).max().item()
    except (RuntimeError, ValueError) as error_here:
        return f"it fails here: {error_here}"
    return "" if error <= BOUND else f"its error on this model's own tokens is {error:.1e}, above the bound {BOUND:.1e}"


def _observed(calls: SimpleNamespace, name: str, site: Attention, worst: list[mx.array]) -> Call:
    call = getattr(calls, name)
    fast = FastAttention(site.heads, site.kv_heads, site.head_dim)

    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        found: mx.array = call(q, k, v)
        worst.append(distance(found, reference(fast, q, k, v)))
        return found

    return attention
