"""Routes: a generated file with what its functions call here, for the weights of one model."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .blocks import Blocks
from .caches import CacheGuard
from .form import stream_dtype
from .in_place import InPlace, copies_of, in_place_sites, run, sites_over_slots
from .joint import find_joints, let_wait, reading
from .kernels import Attention, QKVRope, Site, resolve_all, sites_of
from .products import find_products, pays, with_kernels


class Route(NamedTuple):
    """One generated file: whom it takes (`guard`), what runs for any width and, if it can, for one token.

    sites: what `decode` calls, over caches. in_place: the same over the slots of a lease, where there can be one.
    whole: whether these slots show whole buffers. blocks: what `decode` calls for a few tokens at once, if that pays.
    """

    guard: CacheGuard
    forward: Callable[..., mx.array]
    decode: Callable[..., mx.array] | None
    sites: SimpleNamespace
    in_place: InPlace | None
    whole: bool = False
    blocks: Blocks | None = None


class OneToken(NamedTuple):
    """weights: of `decode`. products: slots that may have a kernel. readers: sites that may be given a Waiting."""

    weights: Any
    products: tuple[tuple[str, Site], ...]
    readers: frozenset[str]


class Refused(NamedTuple):
    """Why K/V are never written in place, why not over rings by token, why blocks take `forward`; or ""."""

    in_place: str = ""
    by_token: str = ""
    blocks: str = ""


def for_one_token(text: nn.Module, weights: Any, files: tuple[ModuleType, ...], kernels: bool | None) -> OneToken:
    """Checks all kernels of this model, products and sites, under one progress bar."""
    every = find_products(files[0], text)
    products = tuple(filter(pays, every))
    own = {name: site for file in files for name, site in sites_of(file).items()}
    joints = find_joints(own, sites_over_slots(own), every, len(weights.layers))
    halves: dict[str, Site] = {
        **{f"{name}_scores": site.scores for name, site in own.items() if isinstance(site, Attention)},
        **copies_of(own),
    }
    named = [
        *halves.items(),
        *((one.slot, one.site) for one in products),
        *((one.name, one.site) for one in joints),
    ]
    sites = [*(site for file in files for site in sites_of(file).values()), *halves.values()]
    wanted = [*sites, *(one.site for one in products), *(one.site for one in joints)]
    calls = resolve_all(wanted, stream_dtype(text), kernels=kernels)[len(sites) :]
    single = with_kernels(weights, products, calls[: len(products)])
    readers = let_wait(single, joints, calls[len(products) :])
    return OneToken(single, tuple(dict.fromkeys(named)), readers)


def make_route(
    file: ModuleType, dtype: mx.Dtype, kernels: bool | None, readers: frozenset[str]
) -> tuple[Route, Refused]:
    """dtype: of the stream. readers: as in OneToken."""
    sites = sites_of(file)
    calls = SimpleNamespace(**dict(zip(sites, resolve_all(sites.values(), dtype, kernels=kernels), strict=True)))
    guard = CacheGuard(file.CACHES)
    blocks = None if guard.quantized else Blocks(file, vars(calls))
    for name in readers & set(sites):
        setattr(calls, name, reading(name, getattr(calls, name)))
    in_place, why_not, by_token = None, "", ""
    if kernels is False:
        why_not = "kernels are off"
    elif not guard.quantized:
        in_place, why_not, by_token = in_place_sites(sites, calls, dtype, kernels, readers)
    for name, site in sites.items():
        if isinstance(site, QKVRope) and site.kv_heads:
            setattr(calls, name, _storing(getattr(calls, name)))
    calls.sliding_layer = calls.full_layer = run
    pays = blocks is None or blocks.pays
    refused = Refused(why_not, by_token, "" if pays else "no fused site is other than MLX's own operations here")
    route = Route(guard, file.forward, file.decode, calls, in_place, blocks=blocks if pays else None)
    return route, refused


def without_decode(route: Route) -> Route:
    """The route of which `forward` takes every call."""
    return route._replace(decode=None, in_place=None, blocks=None)


def _storing(call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """q of a token, and all keys and values of its cache, the token's own included. projected: the call without."""

    def qkv(cache: Any, *inputs: mx.array) -> tuple[Any, ...]:
        q, k, v = call(*inputs)
        return q, *cache.update_and_fetch(k, v)

    qkv.projected = call  # type: ignore[attr-defined]
    return qkv
