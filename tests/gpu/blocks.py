"""What a block of a few tokens, or of a few sequences, may share with `decode`: joined products, attention written out.

    . tests/gpu/path.sh && python3 tests/gpu/blocks.py

First E4B's blocks of several shapes as a whole: which is refused, from which layer on it differs, and whether without
joined products or with MLX's own attention. Then these parts at the sizes of the five models: bits beside MLX's own
calls, and microseconds of each way, a line a shape; on a bare machine each after a minute, while MLX compiles a kernel
for each number of rows. Exits with 1 if one differs anywhere.
"""

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from machine import describe

from straightline.runtime import specialize
from straightline.runtime.arrays import same_bits
from straightline.runtime.decode_check import block_refused
from straightline.runtime.kernels.masked import Fused
from straightline.runtime.kv.make import caches_for
from straightline.runtime.taps import no_tap
from straightline.runtime.verification.proof import from_random

ROWS = (2, 3, 4, 5, 6, 8, 11, 12, 16, 24, 32)
PRODUCTS = {  # inputs: widths of the parts
    "e4b sliding qkv": (2560, (2048, 512, 512)),
    "e4b full qkv": (2560, (4096, 1024, 1024)),
    "e4b gate up": (2560, (10240, 10240)),
    "12b sliding qkv": (3840, (4096, 2048, 2048)),
    "12b full qk": (3840, (8192, 512)),
    "12b gate up": (3840, (15360, 15360)),
    "26b sliding qkv": (2816, (4096, 2048, 2048)),
    "26b full qk": (2816, (8192, 1024)),
    "26b gate up": (2816, (2112, 2112)),
    "31b sliding qkv": (5376, (8192, 4096, 4096)),
    "31b full qk": (5376, (16384, 2048)),
    "31b gate up": (5376, (21504, 21504)),
    "e2b sliding qkv": (1536, (2048, 256, 256)),
    "e2b gate up": (1536, (6144, 6144)),
}
HEADS = {  # heads, KV heads, head_dim
    "e4b sliding": (8, 2, 256),
    "e4b full": (8, 2, 512),
    "12b sliding": (16, 8, 256),
    "12b full": (16, 1, 512),
    "26b full": (16, 2, 512),
    "31b sliding": (32, 16, 256),
    "31b full": (32, 4, 512),
    "e2b sliding": (8, 1, 256),
}
LENGTHS = (17, 300, 511, 512, 600, 1100, 3000)
SHAPES = ((1, 2), (1, 4), (1, 7), (1, 16), (4, 1), (16, 1), (3, 2))  # batch, width
BLOCKS = ((1, 7), (1, 8), (1, 12), (1, 16), (1, 24), (1, 32), (16, 1), (4, 4))
DTYPE = mx.bfloat16


def main() -> int:
    for key, value in describe(None).items():
        print(f"{key:<9} {value}", flush=True)
    layouts()
    wrong = whole("gemma4-e4b")
    wrong += sum(products(name, *shape, bits) for name, shape in PRODUCTS.items() for bits in (4, 8))
    wrong += sum(attention(name, *shape) for name, shape in HEADS.items())
    return int(wrong > 0)


def whole(name: str) -> int:
    """How many shapes are refused."""
    proof = from_random(name, False, None, None, 7)
    bound: Any = specialize(proof.model, strict=True, kernels=True)._bound
    route, refused = next(one for one in bound.routes if one.blocks is not None), 0
    make_caches = partial(caches_for, route.blocks.file.CACHES)
    for shape in BLOCKS:
        ask = partial(block_refused, bound.weights, shape=shape, padded=False, make_caches=make_caches)
        weights = bound.of_blocks[shape[1] > 1]
        reason = ask(weights, route, vocabulary=bound.vocabulary)
        print(f"{name} {shape}: {reason or 'equal'}", flush=True)
        if reason:
            refused += 1
            print(f"  from layer {first_layer(bound, route, shape, make_caches)} on", flush=True)
            print(f"  products apart: {ask(apart(weights), route, vocabulary=bound.vocabulary) or 'equal'}")
            kept = route.blocks._attention
            sites = {kind: getattr(route.blocks.file, f"{kind.upper()}_ATTENTION") for kind in kept}
            route.blocks._attention = {kind: Fused(site) for kind, site in sites.items()}
            print(f"  MLX's own attention: {ask(weights, route, vocabulary=bound.vocabulary) or 'equal'}")
            route.blocks._attention = kept
    return refused


def first_layer(bound: Any, route: Any, shape: tuple[int, int], make_caches: Callable[[], list[Any]]) -> str:
    """Where the hidden states of a block part from forward's: -1 the embedding, then the layers."""
    found: list[dict[int, mx.array]] = []
    ids = mx.arange(shape[0] * shape[1]).reshape(shape)
    for by_decode in (False, True):
        kept: dict[int, mx.array] = {}

        def keep(index: int, rows: mx.array, kept: dict[int, mx.array] = kept) -> mx.array:
            kept[index] = rows
            return rows

        caches = make_caches()
        route.forward(bound.weights, mx.broadcast_to(mx.arange(5), (shape[0], 5)), caches, no_tap)
        if by_decode:
            route.decode(bound.of_blocks[shape[1] > 1], route.blocks.begin(shape, caches), ids, caches, keep)
        else:
            route.forward(bound.weights, ids, caches, keep)
        mx.eval(kept)
        found.append(kept)
    return next((str(index) for index in sorted(found[0]) if not same_bits(found[0][index], found[1][index])), "none")


def apart(weights: Any) -> Any:
    """Gate and up by products of their own, side by side."""
    several = SimpleNamespace(**vars(weights))
    several.layers = [SimpleNamespace(**vars(layer)) for layer in weights.layers]
    for layer in several.layers:
        layer.gated = partial(gated, [layer.gate_proj, layer.up_proj])
    return several


def beside(calls: list[Any], x: mx.array) -> mx.array:
    return mx.concatenate([call(x) for call in calls], axis=-1)


def gated(calls: list[Any], x: mx.array, geglu: Any) -> Any:
    return geglu(beside(calls, x))


def layouts() -> None:
    """How rows lie that a model gives a cache, and what looking at that costs."""
    raw = mx.random.normal((1, 512, 2, 256)).astype(DTYPE)
    v = mx.fast.rms_norm(raw, None, 1e-6).transpose(0, 2, 1, 3)
    k = mx.fast.rope(v, 256, traditional=False, base=10000.0, scale=1.0, offset=3)
    one = mx.random.normal((1, 2, 1, 256)).astype(DTYPE)
    written, turned = mx.slice_update(v, one, mx.array([5]), (2,)), v + 0
    turned[..., 7:8, :] = one
    for name, array in {"v": v, "k, by rope": k, "v, written to": written, "v, a row set": turned}.items():
        mx.eval(array)
        start = time.perf_counter()
        try:
            strides: object = [stride // 2 for stride in memoryview(array.view(mx.uint16)).strides or ()]
        except Exception as error:
            strides = repr(error)
        print(f"{name:<16} strides {strides}, {1e6 * (time.perf_counter() - start):.0f} us to look", flush=True)
        same = mx.array_equal(array, mx.contiguous(array))
        print(f"{'':<16} the same values after: {same.item()}")


def products(name: str, inputs: int, parts: tuple[int, ...], bits: int) -> int:
    packed = [mx.quantize(mx.random.normal((part, inputs)).astype(DTYPE), 64, bits) for part in parts]
    whole = [mx.concatenate(list(arrays)) for arrays in zip(*packed, strict=True)]
    mx.eval(packed, whole)
    differing = {}
    for rows, wide in itertools.product(ROWS, (False, True)):
        x = mx.random.normal((1, rows, inputs) if wide else (rows, 1, inputs)).astype(DTYPE)
        apart = mx.concatenate([product(x, *one, bits) for one in packed], axis=-1)
        joined = product(x, *whole, bits)
        count = int((apart.view(mx.uint16) != joined.view(mx.uint16)).sum().item())
        if count:
            differing[f"{rows}{'w' if wide else 'b'}"] = count
    times = []
    for rows in (4, 16):
        x = mx.random.normal((1, rows, inputs)).astype(DTYPE)
        one, many = alternated(partial(product, x, *whole, bits), partial(apart_products, x, packed, bits))
        times.append(f"{rows} rows {one:.1f} us joined, {many:.1f} apart")
    print(
        f"{name:<16} {bits} bits: {'equal' if not differing else f'DIFFERS {differing}'}; {'; '.join(times)}",
        flush=True,
    )
    return int(bool(differing))


def product(x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    return mx.quantized_matmul(x, weight, scales=scales, biases=biases, transpose=True, group_size=64, bits=bits)


def apart_products(x: mx.array, packed: list[Any], bits: int) -> list[mx.array]:
    return [product(x, *one, bits) for one in packed]


def attention(name: str, heads: int, kv_heads: int, dim: int) -> int:
    differing, compared = {}, 0
    for (batch, width), length in itertools.product(
        ((1, 2), (1, 4), (1, 7), (1, 16), (4, 1), (16, 1), (3, 2)), LENGTHS
    ):
        total = length + width
        room = (total + 255) // 256 * 256
        k, v = (mx.random.normal((batch, kv_heads, room, dim)).astype(DTYPE)[..., :total, :] for _ in range(2))
        q = mx.random.normal((batch, width, heads, dim)).astype(DTYPE).transpose(0, 2, 1, 3)
        q = mx.fast.rope(q, dim, traditional=False, base=10000.0, scale=1.0, offset=length)
        mx.eval(q, k, v)
        causal = causal_mask(width, total)
        masks = {"causal": ("causal", causal), "array": (causal, causal)} if width > 1 else {"none": (None, None)}
        if batch > 1:
            padded = (mx.arange(total) >= mx.arange(batch)[:, None])[:, None, None] & causal
            masks["padded"] = (padded, mx.expand_dims(padded, -3))
        for word, (theirs, ours) in masks.items():
            expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=theirs)
            expected = expected.transpose(0, 2, 1, 3).reshape(batch, width, heads * dim)
            found = written_out(q, k, v, ours)
            count = int((expected.view(mx.uint16) != found.view(mx.uint16)).sum().item())
            compared += found.size
            if count:
                differing[f"{batch}x{width} {length} {word}"] = count
    told = "equal" if not differing else f"DIFFERS in {len(differing)}: {dict(list(differing.items())[:6])}"
    q = mx.random.normal((1, heads, 4, dim)).astype(DTYPE)
    k, v = (mx.random.normal((1, kv_heads, 512, dim)).astype(DTYPE) for _ in range(2))
    mask = causal_mask(4, 512)
    mx.eval(q, k, v, mask)
    one, other = alternated(
        lambda: written_out(q, k, v, mask),
        lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal")
        .transpose(0, 2, 1, 3)
        .reshape(1, 4, heads * dim),
    )
    print(f"{name:<16} {told}, {compared} values; width 4: {one:.1f} us written out, {other:.1f} fallback", flush=True)
    return int(bool(differing))


def causal_mask(width: int, total: int) -> mx.array:
    rows, columns = mx.arange(total - width, total)[:, None], mx.arange(total)[None]
    mask: mx.array = rows >= columns
    return mask


def written_out(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """MLX's fallback, without the product with a scale of 1."""
    batch, heads, width, dim = q.shape
    kv_heads = k.shape[1]
    if heads != kv_heads:
        q = mx.unflatten(q, 1, (kv_heads, heads // kv_heads))
        k, v = mx.expand_dims(k, 2), mx.expand_dims(v, 2)
    scores = q @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, LEAST)
    y = mx.softmax(scores, axis=-1, precise=True) @ v
    if heads != kv_heads:
        y = mx.flatten(y, 1, 2)
    return y.transpose(0, 2, 1, 3).reshape(batch, width, heads * dim)


LEAST = mx.array(mx.finfo(DTYPE).min, DTYPE)


def alternated(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Median microseconds of a call, of 40 that are handed over together; 7 turns each."""
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(8):
        for seconds, call in zip(found, (one, other), strict=True):
            start = time.perf_counter()
            mx.eval([call() for _ in range(40)])
            if turn:
                seconds.append((time.perf_counter() - start) / 40 * 1e6)
    return median(found[0]), median(found[1])


if __name__ == "__main__":
    sys.exit(main())
