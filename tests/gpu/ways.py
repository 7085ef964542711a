"""Ways to decode the same tokens, "mlx-lm" among them, beside each other in one process: bits first, then speed."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from straightline.runtime.arrays import same_bits
from straightline.runtime.benchmark.measures import count_primitives
from straightline.runtime.in_place import lease_of

CONTEXT = {"e4b": 600, "e2b": 600, "12b": 1100, "26b": 1100, "31b": 1100}
PARTS = 15  # tokens taken apart

Ways = Mapping[str, Callable[[mx.array], mx.array]]  # one token [1, 1] to its logits, over caches of the way's own


def greedy(logits: mx.array) -> mx.array:
    token: mx.array = mx.argmax(logits[:, -1, :], axis=-1)[:, None]
    return token


def copied(caches: list[Any], make: Any) -> list[Any]:
    copies = make()
    for copy, cache in zip(copies, caches, strict=True):
        copy.state = tuple(mx.contiguous(one) + 0 if isinstance(one, mx.array) else one for one in cache.state)
    return copies


def equal(size: str, ways: Ways, caches: Mapping[str, list[Any]], steps: int) -> tuple[mx.array, dict[str, str]]:
    """The token to go on with, and where each way departs from mlx-lm's bits; "" if nowhere."""
    token, departs = mx.array([[23]]), dict.fromkeys(ways, "")
    for step in range(steps):
        logits = {way: run(token) for way, run in ways.items()}
        counts = {way: count_primitives([found]) for way, found in logits.items()} if step == steps - 1 else {}
        mx.eval(list(logits.values()))
        for way, found in logits.items():
            if not departs[way] and not same_bits(found, logits["mlx-lm"]):
                departs[way] = f"departs at step {step}"
        token = greedy(logits["mlx-lm"])
    for way, found in departs.items():
        leased = way != "mlx-lm" and lease_of(caches[way]) is not None
        told = f"{counts[way]} primitives; leased {leased}"
        print(f"{size}: {way:<18} {found or f'equal at {steps} steps'}; {told}", flush=True)
    return token, departs


def speed(size: str, ways: Ways, token: mx.array, rounds: int, tokens: int) -> None:
    """Rounds that take turns, the first of them not counted."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, run in ways.items():
            held = greedy(run(token))
            mx.async_eval(held)
            start = time.perf_counter()
            for _ in range(tokens):
                following = greedy(run(held))
                mx.async_eval(following)
                held.item()
                held = following
            rates[way].append(tokens / (time.perf_counter() - start))
    for way, found in rates.items():
        found, base = found[1:], rates["mlx-lm"][1:]
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
        build, dispatch, wait = parts(ways[way], token)
        print(
            f"{size}: {way:<18} x{ratio:.2f}, best over best x{max(found) / max(base):.2f}; tok/s "
            f"{statistics.median(found):.1f}, best {max(found):.1f}; ms build {build:.2f} dispatch {dispatch:.2f} "
            f"wait {wait:.2f}",
            flush=True,
        )


def parts(run: Callable[[mx.array], mx.array], token: mx.array) -> tuple[float, ...]:
    """Milliseconds to build a token's graph, to hand it to the device, and until that is done. Medians."""
    found = []
    for _ in range(PARTS):
        start = time.perf_counter()
        logits = run(token)
        built = time.perf_counter()
        mx.async_eval(logits)
        sent = time.perf_counter()
        mx.synchronize()
        found.append((built - start, sent - built, time.perf_counter() - sent))
    return tuple(1e3 * statistics.median(column) for column in zip(*found, strict=True))
