"""What is run and what is compared: walks of one cache list through prefill, decode and blocks, byte for byte.

Each call is made four times: mlx-lm, generated, mlx-lm tapped, generated tapped, each with its own caches.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache

from straightline.runtime import HiddenTap


@dataclass(frozen=True)
class Walk:
    """Cells in order, each the widths of its calls; all go on with the caches of the one before."""

    cells: tuple[tuple[str, tuple[int, ...]], ...]
    batch: int = 1
    caches: str = "plain"  # or "padded" (mlx-lm's batch caches, the second row padded on the left), or "none"


def walks(window: int, steps: int) -> tuple[Walk, ...]:
    """At a window of 512 or more: 300 tokens inside it, 400 past it, chunks of 256, the wrap after 10 more tokens."""
    inside, extra, chunk = min(300, window * 5 // 8), min(400, window), min(256, window // 2)
    past, near = window + extra, window - min(10, window // 3)
    chunks = (chunk,) * (past // chunk) + ((past % chunk,) if past % chunk else ())
    return (
        Walk((("prefill inside the window", (inside,)), ("decode inside", (1,) * steps))),
        Walk(
            (
                ("prefill past the window, one pass", (past,)),
                ("decode past", (1,) * steps),
                ("blocks of 4 past", (4,) * 4),
                ("blocks of 8 past", (8,) * 4),
            )
        ),
        Walk((("decode across the wrap", (near, *(1,) * steps)),)),
        Walk((("blocks of 4 across the wrap", (near, *(4,) * 6)),)),
        Walk((("blocks of 8 across the wrap", (near, *(8,) * 4)),)),
        Walk(((f"prefill past, chunks of {chunk}", chunks), ("decode after chunks", (1,) * 4))),
        Walk((("a chunk larger than the window", (chunk // 2, window + chunk)), ("blocks of 4 after it", (4,) * 2))),
        Walk((("batch of 2: prefill past", (window + chunk,)), ("batch of 2: decode, blocks", (1,) * 4 + (4, 8))), 2),
        Walk((("padded batch: prefill past", (window + chunk,)), ("padded batch: decode", (1,) * 4)), 2, "padded"),
        Walk((("no cache, inside", (inside,)), ("no cache, past", (window + chunk,))), caches="none"),
    )


@dataclass(frozen=True)
class Row:
    cell: str
    departs: str  # where the first difference is, or empty
    seconds: float
    passed: str = "equal"  # what to print where nothing departs


def run_walk(walk: Walk, oracle: Any, model: Any, vocab: int, seed: int) -> Iterator[Row]:
    """oracle: mlx-lm's model. model: the specialized one. One row for each cell."""
    sentinel = len(oracle.layers)
    caches = [make_caches(oracle, walk) for _ in range(4)]
    key = mx.random.key(seed)
    for cell, calls in walk.cells:
        start = time.perf_counter()
        departs = ""
        for call, length in enumerate(calls):
            key, draw = mx.random.split(key)
            ids = mx.random.randint(0, vocab, (walk.batch, length), key=draw)
            taps = [HiddenTap(range(-1, sentinel + 1)) for _ in range(2)]
            logits = [
                evaluated(oracle(ids, cache=caches[0]), caches[0]),
                evaluated(model(ids, cache=caches[1]), caches[1]),
                evaluated(model.monolith(ids, cache=caches[2], tap=taps[0]), caches[2]),
                evaluated(model(ids, cache=caches[3], tap=taps[1]), caches[3]),
            ]
            captured = [tap.captured for tap in taps]
            found = first_departure(captured, caches, logits, sentinel) or degenerate(logits[0])
            if found and not departs:
                departs = f"call {call} ({length} wide): {found}"
        yield Row(cell, departs, time.perf_counter() - start)


def make_caches(oracle: Any, walk: Walk) -> list[Any] | None:
    if walk.caches == "none":
        return None
    caches: list[Any] = oracle.make_cache()
    if walk.caches == "plain":
        return caches
    padding = [0, 3]
    return [
        BatchRotatingKVCache(one.max_size, padding) if isinstance(one, RotatingKVCache) else BatchKVCache(padding)
        for one in caches
    ]


def evaluated(logits: mx.array, caches: list[Any] | None) -> mx.array:
    mx.eval(logits, [one.state for one in caches or []])
    return logits


def first_departure(
    taps: list[dict[int, mx.array]], caches: list[list[Any] | None], logits: list[mx.array], sentinel: int
) -> str:
    """The first of all the pairs, in the order of the forward, whose bytes differ; or empty."""
    for captured in taps:
        if set(captured) != set(range(-1, sentinel + 1)):
            return f"taps {sorted(captured)} were captured, not -1 to {sentinel}"
    pairs = [(f"tap {index}", taps[0][index], taps[1][index]) for index in sorted(taps[0])]
    for side, others in zip(("generated", "mlx-lm tapped", "generated tapped"), caches[1:], strict=True):
        for index, (one, other) in enumerate(zip(caches[0] or [], others or [], strict=True)):
            for name, value in vars(one).items():
                if isinstance(value, mx.array):
                    pairs.append((f"{side}: cache {index} {name}", value, getattr(other, name)))
                elif value != getattr(other, name):
                    return f"{side}: cache {index} {name} is {getattr(other, name)}, not {value}"
    for side, other in zip(("generated", "mlx-lm tapped", "generated tapped"), logits[1:], strict=True):
        pairs.append((f"{side}: logits", logits[0], other))
    for name, one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} is {other.dtype} {list(other.shape)}, not {one.dtype} {list(one.shape)}"
    unequal: Any = mx.stack([mx.any(raw(one) != raw(other)) for _, one, other in pairs]).tolist()
    found = [pair for pair, differs in zip(pairs, unequal, strict=True) if differs]
    if not found:
        return ""
    name, one, other = found[0]
    where = (raw(one) != raw(other)).flatten()
    first = mx.argmax(where).item()
    return (
        f"{name} at flat index {first} ({mx.sum(where).item()} of {one.size} values); "
        f"then {', '.join(name for name, _, _ in found[1:3]) or 'nothing else'}"
    )


def raw(value: mx.array) -> mx.array:
    """The bytes of an array as integers, so that a NaN equals itself and -0.0 differs from 0.0."""
    return value.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[value.dtype.size])


def degenerate(logits: mx.array) -> str:
    """Equal bytes prove nothing if the numbers are all the same or not numbers."""
    last = logits[:, -1].astype(mx.float32)
    if not mx.all(mx.isfinite(last)).item():
        return "mlx-lm's own logits are not finite"
    return "" if mx.all(mx.std(last, axis=-1) > 0.01).item() else "mlx-lm's own logits are constant"
