"""What is run and what is compared: walks of one cache list through prefill, decode and blocks, byte for byte.

Each call is made four times: mlx-lm, generated, mlx-lm tapped, generated tapped, each with its own caches. Within a run
of single tokens nobody looks at these, since who does ends a lease (../in_place).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache

from ..arrays import bits, difference
from ..kv import make_cache, with_stand_ins
from ..taps import HiddenTap


@dataclass(frozen=True)
class Walk:
    """Cells in order, each the widths of its calls; all go on with the caches of the one before."""

    cells: tuple[tuple[str, tuple[int, ...]], ...]
    batch: int = 1
    # or "batch" (mlx-lm's batch caches), "padded" (the same, the second row padded on the left), "none", "kv" (by the
    # kv_config), "rollback" or "kv rollback" (half of each block is taken back before the next call)
    caches: str = "plain"


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
        # mlx-lm's ring then keeps its rows as the model gave them. Six, since K/V in place begin with the fifth.
        Walk((("decode after a prompt of the window", (window, *(1,) * max(steps, 6))),)),
        Walk((("blocks of 4 across the wrap", (near, *(4,) * 6)),)),
        Walk((("blocks of 8 across the wrap", (near, *(8,) * 4)),)),
        Walk(((f"prefill past, chunks of {chunk}", chunks), ("decode after chunks", (1,) * 4))),
        Walk((("a chunk larger than the window", (chunk // 2, window + chunk)), ("blocks of 4 after it", (4,) * 2))),
        Walk((("batch of 2: prefill past", (window + chunk,)), ("batch of 2: decode, blocks", (1,) * 4 + (4, 8))), 2),
        Walk((("padded batch: prefill past", (window + chunk,)), ("padded batch: decode", (1,) * 4)), 2, "padded"),
        Walk((("batch of 1: decode across the wrap", (near, *(1,) * steps)),), caches="batch"),
        # As the server's after a long prompt. Eight, since K/V in place begin with the sixth.
        Walk((("batch of 1: decode past the window", (past, *(1,) * max(steps, 8))),), caches="batch"),
        Walk((("no cache, inside", (inside,)), ("no cache, past", (window + chunk,))), caches="none"),
    )


def more_walks(window: int, steps: int, kv: bool) -> tuple[Walk, ...]:
    """Blocks of 2, rollback, and with `kv` quantized caches: inside, across and past the window."""
    extra, chunk, near = min(400, window), min(256, window // 2), window - min(10, window // 3)
    blocks = Walk((("blocks of 2 across the wrap", (near, *(2,) * 6)), ("blocks of 2 past", (window, *(2,) * 2))))
    rolled = (near, *(4,) * 6, 8, 1)
    plain = Walk((("rollback: blocks half taken back", rolled), ("rollback: decode", (1,) * 4)), caches="rollback")
    if not kv:
        return blocks, plain
    return (
        blocks,
        plain,
        Walk(
            (
                ("quantized K/V: prefill past", (window + extra,)),
                ("quantized K/V: decode", (1,) * steps),
                ("quantized K/V: blocks of 4 and 8", (4, 8) * 2),
            ),
            caches="kv",
        ),
        Walk((("quantized K/V: decode across the wrap", (near, *(1,) * steps)),), caches="kv"),
        Walk((("quantized K/V: chunks", (chunk,) * 4), ("quantized K/V: batch of 2", (1, 4))), 2, "kv"),
        Walk((("quantized K/V: rollback", rolled),), caches="kv rollback"),
    )


@dataclass(frozen=True)
class Row:
    cell: str
    departs: str  # where the first difference is, or empty
    seconds: float
    passed: str = "equal"  # what to print where nothing departs


def run_walk(
    walk: Walk, oracle: Any, model: Any, vocab: int, seed: int, kv_config: list[dict[str, int]] | None = None
) -> Iterator[Row]:
    """oracle: mlx-lm's model. model: the specialized one. One row for each cell."""
    sentinel = len(oracle.layers)
    sources = oracle.get("language_model", oracle)["model"].previous_kvs
    caches = [make_caches(oracle, walk, kv_config) for _ in range(4)]
    key = mx.random.key(seed)
    for cell, calls in walk.cells:
        start = time.perf_counter()
        departs = ""
        served = dict(model.dispatch.counts)
        for call, length in enumerate(calls):
            key, draw = mx.random.split(key)
            ids = mx.random.randint(0, vocab, (walk.batch, length), key=draw)
            looked_at = length > 1 or call == len(calls) - 1
            seen = [one if looked_at else None for one in caches]
            taps = [HiddenTap(range(-1, sentinel + 1)) for _ in range(2)]
            try:
                # mlx-lm needs the stand-ins where layers share quantized K/V; else they are the caches themselves.
                expected = evaluated(oracle(ids, cache=with_stand_ins(caches[0], sources)), seen[0])
            except RuntimeError as error:  # MLX lacks a kernel on this device: nothing to compare with
                if "No implementation" not in str(error):
                    raise
                reason = f"cannot: mlx-lm itself, in call {call} ({length} wide): {_first_line(error)}"
                yield Row(cell, departs, time.perf_counter() - start, reason)
                return
            try:
                logits = [
                    expected,
                    evaluated(model(ids, cache=caches[1]), seen[1]),
                    evaluated(model.monolith(ids, cache=caches[2], tap=taps[0]), seen[2]),
                    evaluated(model(ids, cache=caches[3], tap=taps[1]), seen[3]),
                ]
            except RuntimeError as error:
                reason = f"call {call} ({length} wide) fails where mlx-lm's does not: {_first_line(error)}"
                yield Row(cell, departs or reason, time.perf_counter() - start)
                return
            captured = [tap.captured for tap in taps]
            found = first_departure(captured, seen, logits, sentinel) or degenerate(logits[0])
            if found and not departs:
                departs = f"call {call} ({length} wide): {found}"
            if walk.caches.endswith("rollback") and call:
                for one in (one for each in caches for one in each or []):
                    one.trim(length // 2)
        by_hand = model.dispatch.counts["monolith"] - served["monolith"]
        passed = f"monolith: {model.dispatch.last[1]}" if by_hand else "equal"
        yield Row(cell, departs, time.perf_counter() - start, passed)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def make_caches(oracle: Any, walk: Walk, kv_config: list[dict[str, int]] | None) -> list[Any] | None:
    if walk.caches == "none":
        return None
    if walk.caches not in ("plain", "batch", "padded"):
        kv = kv_config if walk.caches.startswith("kv") else None
        return make_cache(oracle, kv, rollback=walk.caches.endswith("rollback"))
    caches: list[Any] = oracle.make_cache()
    if walk.caches == "plain":
        return caches
    padding = [0, 3] if walk.caches == "padded" else [0]
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
            theirs = attributes(other)
            for name, value in attributes(one).items():
                if isinstance(value, mx.array):
                    pairs.append((f"{side}: cache {index} {name}", value, theirs[name]))
                elif value != theirs[name]:
                    return f"{side}: cache {index} {name} is {theirs[name]}, not {value}"
    for side, other in zip(("generated", "mlx-lm tapped", "generated tapped"), logits[1:], strict=True):
        pairs.append((f"{side}: logits", logits[0], other))
    for name, one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} is {other.dtype} {list(other.shape)}, not {one.dtype} {list(one.shape)}"
    unequal: Any = mx.stack([mx.any(bits(one) != bits(other)) for _, one, other in pairs]).tolist()
    found = [pair for pair, differs in zip(pairs, unequal, strict=True) if differs]
    if not found:
        return ""
    name, one, other = found[0]
    return f"{name} {difference(other, one)}; then {', '.join(name for name, _, _ in found[1:3]) or 'nothing else'}"


def attributes(cache: Any) -> dict[str, Any]:
    """Everything that a cache holds, that of the parts of a quantized one included."""
    found: dict[str, Any] = {}
    for name, value in vars(cache).items():
        if name == "parts":
            for index, part in enumerate(value):
                found |= {f"part {index} {inner}": held for inner, held in attributes(part).items()}
        else:
            found[name] = value
    return found


def degenerate(logits: mx.array) -> str:
    """Equal bytes prove nothing if the numbers are all the same or not numbers."""
    last = logits[:, -1].astype(mx.float32)
    if not mx.all(mx.isfinite(last)).item():
        return "mlx-lm's own logits are not finite"
    return "" if mx.all(mx.std(last, axis=-1) > 0.01).item() else "mlx-lm's own logits are constant"
