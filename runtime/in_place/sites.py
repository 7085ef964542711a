"""The sites of `decode` over slots in the place of caches, from those of a generated file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx

from ..joint import in_place_name, reading
from ..kernels import Attention, HeadCopies, QKVRope, QKVRopeInto, Site, resolve_all, resolved
from .compiled import CompiledLayers
from .slot import Slot


class InPlace(NamedTuple):
    """What `decode` calls over slots: while rings fill up, and when only the layers with full attention change.

    by_token: the same where rows of rings lie token by token; None if such rings are not leased.
    """

    moving: SimpleNamespace
    settled: SimpleNamespace
    by_token: "InPlace | None" = None

    def uncompiled(self) -> "InPlace":
        by_token = self.by_token
        return InPlace(self.moving, self.moving, None if by_token is None else by_token.uncompiled())


def sites_over_slots(sites: Mapping[str, Site]) -> dict[str, Site]:
    """Those of a file's sites that are others over slots, as what they are there."""
    wanted = {name: _over_slots(name, site, sites) for name, site in sites.items()}
    return {name: site for name, site in wanted.items() if site is not None}


def in_place_sites(
    sites: Mapping[str, Site],
    calls: SimpleNamespace,
    dtype: mx.Dtype,
    kernels: bool | None,
    readers: frozenset[str] = frozenset(),
) -> tuple[InPlace | None, str, str]:
    """As `calls`, but each token's K/V written where it stays; or None and the reason. Last, why rows by token are not.

    sites: a file's, by name in lower case. calls: what serves them over ordinary caches. kernels: as for `resolved`.
    readers: as `let_wait` gives them.
    """
    ours = sites_over_slots(sites)
    over = dict(vars(calls))
    for (name, site), found in zip(ours.items(), resolved(ours.values(), dtype, kernels=kernels), strict=True):
        if found.state == "plain":
            return None, f"{name}: {found.reason}", ""
        call = reading(in_place_name(name), found.call) if name in readers else found.call
        if isinstance(site, Attention):
            call = site.over_views(*resolve_all((site.scores,), dtype, kernels=kernels))
        over[name] = call
        if isinstance(site, QKVRopeInto):
            over[name] = _into(call)
    exact, copying = in_place(over), copies_of(sites)
    found_copies = resolved(copying.values(), dtype, kernels=kernels)
    refused = (f"{name}: {one.reason}" for name, one in zip(copying, found_copies, strict=True) if one.state == "plain")
    by_token_reason = next(refused, "")
    if by_token_reason or not copying:
        return exact, "", by_token_reason
    copies = dict(zip(copying, (one.call for one in found_copies), strict=True))
    return exact._replace(by_token=in_place(over | over_rows_by_token(sites, over, copies))), "", ""


def copies_of(sites: Mapping[str, Site]) -> dict[str, HeadCopies]:
    """What rings by token need of the sites, by name.

    Of sliding layers, since other caches are no rings. With one KV head rows lie in one way only.
    """
    return {
        f"{name}_copies": HeadCopies(QKVRopeInto(site))
        for name, site in sites.items()
        if isinstance(site, QKVRope) and site.kv_heads > 1 and name.startswith("sliding")
    }


def over_rows_by_token(
    sites: Mapping[str, Site], calls: Mapping[str, Any], copies: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """The calls that are others for them: attention, its readers' too, sees copies alone, by MLX's own operations.

    calls: over rows head by head. copies: of the sites of `copies_of`.
    """
    seen = {
        name: site.over_views(site.scores.plain)
        for name, site in sites.items()
        if isinstance(site, Attention) and name.startswith("sliding")
    }
    names = ((name.removesuffix("_copies"), call) for name, call in copies.items())
    return seen | {name: _copied(calls[name], call) for name, call in names}


def _copied(qkv: Callable[..., Any], copies: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def copied(slot: Slot, *inputs: Any) -> tuple[Any, ...]:
        q, k, v = qkv(slot, *inputs)
        return q, *copies(q, k, v)

    return copied


def in_place(calls: Mapping[str, Any]) -> InPlace:
    """calls: of the sites, by name."""
    moving = SimpleNamespace(**calls, sliding_layer=run, full_layer=run)
    return InPlace(moving, SimpleNamespace(**calls, sliding_layer=CompiledLayers(moving).run, full_layer=run))


def over_whole_buffers(exact: InPlace, attention: Mapping[str, Callable[..., mx.array]]) -> InPlace:
    """As `exact`, over slots that show whole buffers: attention by calls (q, k, v, rows), by name.

    No shape changes from token to token until a buffer grows, so that all layers are compiled, if any are in `exact`.
    Attention is told how rows lie, so that the same calls are for any.
    """
    calls = dict(vars(exact.moving)) | {name: _over_whole(call) for name, call in attention.items()}
    moving = settled = SimpleNamespace(**calls)
    if exact.settled is not exact.moving:
        compiled = CompiledLayers(moving).run
        settled = SimpleNamespace(**calls | {"sliding_layer": compiled, "full_layer": compiled})
    found = InPlace(moving, settled)
    return found if exact.by_token is None else found._replace(by_token=found)


def _over_whole(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(q: mx.array, k: mx.array, v: tuple[mx.array, mx.array]) -> mx.array:
        return call(q, k, *v)

    return attention


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """A layer whose arrays are others at every token."""
    return function(*arguments)


def _over_slots(name: str, site: Site, sites: Mapping[str, Site]) -> Site | None:
    """What a site is over slots; None if it is the same."""
    if isinstance(site, QKVRope):
        if site.kv_heads:
            return QKVRopeInto(site)
        attention = sites.get(name.replace("_query", "_attention"))  # none over quantized K/V
        return replace(site, grouped=attention.kv_heads) if isinstance(attention, Attention) else None
    return site if isinstance(site, Attention) else None


def _into(call: Callable[..., mx.array]) -> Callable[..., tuple[mx.array, Any, Any]]:
    def qkv(slot: Slot, *inputs: Any) -> tuple[mx.array, Any, Any]:
        q = call(*inputs, slot.keys, slot.values, slot.ring, slot.clock.after)
        return q, slot.k, slot.v

    return qkv
