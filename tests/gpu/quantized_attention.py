"""Which quantized products MLX has on this device, whether they are right, and what may stand in. About 25 s.

    . tests/gpu/path.sh
    python3 tests/gpu/quantized_attention.py       # --limit 18: seconds for each part; --toy: small, for a CPU
    python3 tests/gpu/quantized_attention.py --parts products,attention,decode --ways "contiguous,folded" --limit 600

Parts, one line a cell. `one token` runs q @ K^T for one token where two heads share each KV head, over rows laid out
as a cache hands them out. `packing` quantizes and dequantizes, a slice too. `decode` times whole attentions at one
token. `products` and `attention` are many more shapes; on CUDA they need kernels that MLX compiles for half a minute
each, anew in every process. A cell says `ok`, the largest error against float64 (relative to the largest number;
1e+00 is wrong) and the time; or the error that MLX raised.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from machine import describe
from mlx_lm.models.base import quantized_scaled_dot_product_attention as mlx_lm_attention

from straightline.runtime.arrays import bits as unsigned

Rows = tuple[mx.array, ...]
STEP = 256  # caches grow by this many rows, and hand out a slice of what they have


@dataclass(frozen=True)
class Heads:
    """One kind of layer: query heads over KV heads of `dim` numbers."""

    name: str
    queries: int
    keys: int
    dim: int


KINDS = (
    Heads("e4b full", 8, 2, 512),
    Heads("e4b sliding", 8, 2, 256),
    Heads("12b full", 16, 1, 512),
    Heads("12b sliding", 16, 8, 256),
    Heads("26b full", 16, 2, 512),
)
PACKINGS = ((4, 64), (8, 64), (2, 64), (3, 64), (6, 64), (4, 32), (4, 128), (8, 32), (8, 128))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--limit", type=float, default=18, help="seconds for each part, then the next")
    parser.add_argument("--toy", action="store_true", help="short rows, for a CPU")
    parser.add_argument("--parts", default="one token,packing,decode", help="also: products, attention")
    parser.add_argument("--ways", default=f"{FAST},{PLAIN}", help=f"of {', '.join(WAYS)} (default: %(default)s)")
    options = parser.parse_args(arguments)
    for key, value in describe(None).items():
        print(f"{key:<12} {value}", flush=True)
    ways = tuple(options.ways.split(","))
    parts = {
        "one token": one_token,
        "packing": packing,
        "products": products,
        "attention": partial(attention, ways),
        "decode": partial(decode, ways),
    }
    for name in options.parts.split(","):
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        for cell in parts[name](options.toy):
            print(f"   {cell}", flush=True)
            if time.perf_counter() - start > options.limit:
                print("   left out from here on: out of time", flush=True)
                break
        print(f"   {time.perf_counter() - start:.0f} s", flush=True)
    return 0


# Products


def one_token(toy: bool) -> Iterator[str]:
    """What MLX's kernel for few rows computes; CUDA has that one compiled already."""
    for kind in (Heads("2 over 1", 2, 1, 256), Heads("4 over 2", 4, 2, 256)):
        for tokens in (200,) if toy else (912, 1024):
            for layout in LAYOUTS:
                yield from lines("q @ K^T", kind, layout, (4, 64), (1,), tokens)


def packing(toy: bool) -> Iterator[str]:
    """Every packing, of a whole and of a slice: against float64 from the same codes, scales and biases."""
    for bits, group in PACKINGS:
        head = f"{bits} bits of {group:<3} "
        try:
            rows = mx.random.normal((2, 4, 64 if toy else 512, 256)).astype(mx.bfloat16)
            packed = mx.quantize(rows, group, bits)
            whole = mx.dequantize(*packed, group, bits)
            some = mx.dequantize(*(part[:, :, 3:-5] for part in packed), group, bits)
            mx.eval(whole, some)
            error = apart(whole, unpacked(packed, bits, group))
            lost = apart(whole, float64(rows))
            same = mx.array_equal(some, whole[:, :, 3:-5]).item()
        except Exception as error:
            yield head + short(error)
            continue
        yield f"{head}ok {error:.0e}; {lost:.0e} from what was packed; a slice is {'the same' if same else 'WRONG'}"


def unpacked(packed: Any, bits: int, group: int) -> np.ndarray[Any, Any]:
    """float64 of the codes, which lie one after another from the lowest bit of the first word."""
    words = host(packed[0])
    flat = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(*words.shape[:-1], -1, bits)
    codes = (flat * (1 << np.arange(bits))).sum(-1).astype(np.float64)
    scales, biases = (np.repeat(float64(part), group, axis=-1) for part in packed[1:])
    return codes * scales + biases


def products(toy: bool) -> Iterator[str]:
    """Every layout for one packing, then every packing and width for the layouts that a cure could hand out."""
    tokens = 200 if toy else 912
    for product in ("q @ K^T", "p @ V"):
        for kind in KINDS[:3]:
            for layout in LAYOUTS:
                yield from lines(product, kind, layout, (4, 64), (1, 2, 8, 16, tokens), tokens)
    for product in ("q @ K^T", "p @ V"):
        for kind in KINDS[:2]:
            for packing in PACKINGS:
                widths = (1, 2, 4, 7, 8, 16, 33, tokens)
                yield from lines(product, kind, "contiguous", packing, widths, tokens)
    for tokens in (1, 2, 17, 64, 512, 527, 1024):
        for product in ("q @ K^T", "p @ V"):
            yield from lines(product, KINDS[0], "contiguous", (4, 64), (1, 4, min(tokens, 64)), tokens)


LAYOUTS: dict[str, Callable[[mx.array, int, int], mx.array]] = {
    # what a growing cache hands out, and mlx-lm's own
    "slice": lambda rows, tokens, repeats: rows[..., :tokens, :][:, :, None],
    # the same, copied
    "contiguous": lambda rows, tokens, repeats: mx.contiguous(rows[..., :tokens, :])[:, :, None],
    # one copy for each query head
    "repeated": lambda rows, tokens, repeats: mx.contiguous(
        mx.broadcast_to(
            rows[..., :tokens, :][:, :, None], (rows.shape[0], rows.shape[1], repeats, tokens, rows.shape[-1])
        )
    ),
}


def lines(
    product: str, kind: Heads, layout: str, packing: tuple[int, int], widths: tuple[int, ...], tokens: int
) -> Iterator[str]:
    """One for each width, since each may take its own half minute to compile."""
    bits, group = packing
    head = f"{product:<7} {kind.name:<11} {layout:<10} {bits} bits of {group:<3} {tokens:>4} rows "
    repeats = kind.queries // kind.keys
    try:
        rows = mx.random.normal((1, kind.keys, -(-tokens // STEP) * STEP, kind.dim)).astype(mx.bfloat16)
        packed = mx.quantize(rows, group, bits)
        plain = mx.dequantize(*packed, group, bits)[..., :tokens, :]
        handed = [LAYOUTS[layout](part, tokens, repeats) for part in packed]
        mx.eval(handed, plain)
    except Exception as error:
        yield f"{head}packing: {short(error)}"
        return
    for width in widths:
        yield f"{head}by {one_product(product, kind, packing, handed, plain, width)}"


def one_product(product: str, kind: Heads, packing: tuple[int, int], handed: Any, plain: mx.array, width: int) -> str:
    bits, group = packing
    scores = product == "q @ K^T"
    tokens = plain.shape[-2]
    shape = (1, kind.keys, kind.queries // kind.keys, width, kind.dim if scores else tokens)
    left = mx.random.normal(shape) if scores else mx.softmax(mx.random.normal(shape), axis=-1)
    left = left.astype(mx.bfloat16)
    mx.eval(left)

    def act() -> mx.array:
        return mx.quantized_matmul(left, *handed, transpose=scores, group_size=group, bits=bits)

    try:
        out = act()
        mx.eval(out)
    except Exception as error:
        return f"{width}: {short(error)}"
    some = [0, width // 2, width - 1]
    right = float64(plain)[:, :, None]
    expected = float64(left[..., some, :]) @ (right.swapaxes(-1, -2) if scores else right)
    return f"{width}: ok {apart(out[..., some, :], expected):.0e} {milliseconds(act):.3f} ms"


# Whole attentions


def attention(ways: tuple[str, ...], toy: bool) -> Iterator[str]:
    """L new tokens over T rows, T - L of them from before."""
    cases = ((64, 64), (4, 200)) if toy else ((912, 912), (4, 1000), (16, 1000), (2048, 4096), (2048, 32768))
    for width, tokens in cases:
        for kind in (KINDS[0], KINDS[2]) if tokens > 4096 else KINDS:
            yield from whole(kind, (4, 64), width, tokens, ways)
    for packing in PACKINGS[1:]:
        yield from whole(KINDS[0], packing, 64, 200 if toy else 600, ways)


def decode(ways: tuple[str, ...], toy: bool) -> Iterator[str]:
    for tokens in (200,) if toy else (1000, 32000, 8000):
        for kind in KINDS[:3] if tokens > 1000 else KINDS:
            for packing in PACKINGS[:2]:
                yield from whole(kind, packing, 1, tokens, ways)


def quantized(q: mx.array, keys: Rows, values: Rows, mask: Any, bits: int, group: int, tokens: int) -> mx.array:
    out: mx.array = mlx_lm_attention(q, keys, values, scale=1.0, mask=mask, group_size=group, bits=bits)
    return out


def copied(q: mx.array, keys: Rows, values: Rows, mask: Any, bits: int, group: int, tokens: int) -> mx.array:
    keys, values = (tuple(map(mx.contiguous, rows)) for rows in (keys, values))
    return quantized(q, keys, values, mask, bits, group, tokens)


def folded(q: mx.array, keys: Rows, values: Rows, mask: Any, bits: int, group: int, tokens: int) -> mx.array:
    """The queries of one KV head below each other: no batch of repeats is left to broadcast over. One token only."""
    batch, heads, width, dim = q.shape
    if width != 1:
        raise ValueError("one token only")
    q = q.reshape(batch, keys[0].shape[1], -1, dim)
    return copied(q, keys, values, None, bits, group, tokens).reshape(batch, heads, width, dim)


def fast(q: mx.array, keys: Rows, values: Rows, mask: Any, bits: int, group: int, tokens: int) -> mx.array:
    k, v = (mx.dequantize(*rows, group, bits) for rows in (keys, values))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)


def matmuls(q: mx.array, keys: Rows, values: Rows, mask: Any, bits: int, group: int, tokens: int) -> mx.array:
    """As mlx-lm's, with the two products over what was dequantized."""
    batch, heads, width, dim = q.shape
    k, v = (mx.dequantize(*rows, group, bits)[:, :, None] for rows in (keys, values))
    scores = q.reshape(batch, k.shape[1], -1, width, dim) @ k.swapaxes(-1, -2)
    if mask is not None:
        rows = mx.arange(tokens - width, tokens)[:, None]
        scores = mx.where(rows >= mx.arange(tokens)[None], scores, mx.finfo(scores.dtype).min)
    return (mx.softmax(scores, axis=-1, precise=True) @ v).reshape(batch, heads, width, dim)


FAST, PLAIN = "dequantized", "plain"
WAYS: dict[str, Any] = {
    "slices": quantized,
    "contiguous": copied,
    "folded": folded,
    FAST: fast,
    "written out": matmuls,
    PLAIN: None,
}


def whole(kind: Heads, packing: tuple[int, int], width: int, tokens: int, ways: tuple[str, ...]) -> Iterator[str]:
    bits, group = packing
    head = f"{kind.name:<11} {bits} bits of {group:<3} {width:>4} over {tokens:>5}  "
    mx.random.seed(3)
    mask = "causal" if width > 1 else None
    allocated = -(-tokens // STEP) * STEP
    rows = [mx.random.normal((1, kind.keys, allocated, kind.dim)).astype(mx.bfloat16) for _ in "kv"]
    # As the model makes them: heads swapped to the front, then RoPE.
    q = (mx.random.normal((1, width, kind.queries, kind.dim)) * kind.dim**-0.5 * 3).astype(mx.bfloat16)
    q = mx.fast.rope(q.transpose(0, 2, 1, 3), kind.dim, traditional=False, base=1e4, scale=1.0, offset=mx.array(7))
    try:
        packed = [mx.quantize(one, group, bits) for one in rows]
        plain = [mx.dequantize(*parts, group, bits)[..., :tokens, :] for parts in packed]
        mx.eval(packed, plain, q)
    except Exception as error:
        yield f"{head}packing: {short(error)}"
        return
    some = sorted({0, width // 2, width - 1})
    expected = reference(q, plain, some, width, tokens)

    def run(way: str) -> mx.array:
        if way == PLAIN:
            return mx.fast.scaled_dot_product_attention(q, *plain, scale=1.0, mask=mask)
        # Sliced anew at each call, as a cache does.
        handed = [tuple(part[..., :tokens, :] for part in parts) for parts in packed]
        out: mx.array = WAYS[way](q, *handed, mask, bits, group, tokens)
        return out

    for way in ways:
        yield f"{head}{way:<20} {measured(partial(run, way), some, expected)}"


def measured(run: Callable[[], mx.array], some: list[int], expected: np.ndarray[Any, Any]) -> str:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    try:
        out = run()
        mx.eval(out)
    except Exception as error:
        return short(error)
    peak = (mx.get_peak_memory() - before) / 1e6
    error = apart(out[:, :, some], expected)
    return f"ok {error:.0e} {milliseconds(run):9.3f} ms  {peak:8.1f} MB more at the peak"


def reference(q: mx.array, plain: list[mx.array], some: list[int], width: int, tokens: int) -> np.ndarray[Any, Any]:
    """float64 attention of some of the new tokens."""
    keys, values = map(float64, plain)
    repeats = q.shape[1] // keys.shape[1]
    queries = float64(q[:, :, some]).reshape(1, keys.shape[1], repeats, len(some), -1)
    scores = queries @ keys[:, :, None].swapaxes(-1, -2)
    seen = np.arange(tokens)[None] <= np.array(some)[:, None] + tokens - width
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ values[:, :, None]
    return out.reshape(1, q.shape[1], len(some), -1)


# Measures


def float64(value: mx.array) -> np.ndarray[Any, Any]:
    return host(value.astype(mx.float32)).astype(np.float64)


def host(value: mx.array) -> np.ndarray[Any, Any]:
    """A copy that the CPU made: of what lies on the device numpy has read other numbers than were there."""
    mx.eval(value)
    with mx.stream(mx.cpu):
        copy = (unsigned(value) | 0).view(value.dtype)
        mx.eval(copy)
    return np.array(copy)


def apart(found: mx.array, expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(float64(found) - expected).max() / np.abs(expected).max())


def milliseconds(act: Callable[[], mx.array]) -> float:
    """The best of three. A short one is called 10 times in one evaluation."""
    calls, taken = 1, []
    for _ in range(4):
        start = time.perf_counter()
        mx.eval([act() for _ in range(calls)])
        taken.append((time.perf_counter() - start) / calls)
        if calls == 1 and taken[0] < 0.01:
            calls, taken = 10, []
    return min(taken) * 1e3


def short(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    known = text.find("No implementation")
    return f"{type(error).__name__}: {text[known if known >= 0 else 0:][:130]}"


if __name__ == "__main__":
    sys.exit(main())
