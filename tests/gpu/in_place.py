"""Decoding into the caches' own rows, at full size on a GPU: bits beside mlx-lm's, then speed. About 60 s a size.

Exits with 1 if any differ.

python3 tests/gpu/in_place.py --sizes e4b,12b,26b --rounds 6 --steps 32
"""

import argparse
import gc
import statistics
import sys
import time
import traceback
from typing import Any

import mlx.core as mx

from straightline.runtime import specialize
from straightline.runtime.arrays import same_bits
from straightline.runtime.benchmark.measures import count_primitives
from straightline.runtime.in_place import InPlace, lease_of
from straightline.runtime.kernels import report
from straightline.runtime.verification.proof import from_random

CONTEXT = {"e4b": 600, "e2b": 600, "12b": 1100, "26b": 1100, "31b": 1100}


def greedy(logits: mx.array) -> mx.array:
    token: mx.array = mx.argmax(logits[:, -1, :], axis=-1)[:, None]
    return token


def copied(caches: list[Any], make: Any) -> list[Any]:
    copies = make()
    for copy, cache in zip(copies, caches, strict=True):
        copy.state = tuple(mx.contiguous(one) + 0 if isinstance(one, mx.array) else one for one in cache.state)
    return copies


def one(name: str, rounds: int, steps: int, tokens: int, reduced: bool) -> bool:
    """Whether everything was equal."""
    started = time.perf_counter()
    proof = from_random(f"gemma4-{name}", reduced, None, None, 7)
    oracle = proof.oracle
    model = specialize(proof.model, strict=True, kernels=not reduced)
    print(f"{name}: specialize {time.perf_counter() - started:.1f} s", flush=True)
    print(f"{name}: decode_reason={model.dispatch.decode_reason!r} in_place_reason={model.dispatch.in_place_reason!r}")
    for site, (state, reason) in report().items():
        print(f"  {state:<12} {reason[:100]:<100} {site!r:.120}")
    bound = model._bound
    prompt = mx.array([[(7919 * index) % proof.vocabulary for index in range(20 if reduced else CONTEXT[name])]])
    filled = oracle.make_cache()
    mx.eval(oracle(prompt, cache=filled), [cache.state[:2] for cache in filled])
    full = bound.routes
    moving = tuple(r._replace(in_place=r.in_place and InPlace(r.in_place.moving, r.in_place.moving)) for r in full)
    ordinary = tuple(r._replace(in_place=None) for r in full)
    routes = {"decode": ordinary, "in place": moving, "compiled": full}
    caches = {side: copied(filled, model.make_cache) for side in ("mlx-lm", *routes)}

    def side(which: str) -> Any:
        def run(ids: mx.array) -> mx.array:
            if which == "mlx-lm":
                return oracle(ids, cache=caches[which])
            bound.routes = routes[which]
            return model(ids, cache=caches[which])

        return run

    sides = {which: side(which) for which in caches}
    token = mx.array([[23]])
    departs = dict.fromkeys(sides, "")
    for step in range(steps):
        logits = {which: run(token) for which, run in sides.items()}
        if step == steps - 1:
            for which, found in logits.items():
                print(f"{name}: {which}: {count_primitives([found])} primitives")
        mx.eval(list(logits.values()))
        for which, found in logits.items():
            if not departs[which] and not same_bits(found, logits["mlx-lm"]):
                departs[which] = f"departs at step {step}"
        token = greedy(logits["mlx-lm"])
    for which, found in departs.items():
        leased = which != "mlx-lm" and lease_of(caches[which]) is not None
        print(f"{name}: {which}: {found or f'equal at {steps} steps'}; leased {leased}", flush=True)
    rates: dict[str, list[float]] = {which: [] for which in sides}
    for _ in range(rounds + 1):
        for which, run in sides.items():
            held = greedy(run(token))
            mx.async_eval(held)
            start = time.perf_counter()
            for _ in range(tokens):
                following = greedy(run(held))
                mx.async_eval(following)
                held.item()
                held = following
            rates[which].append(tokens / (time.perf_counter() - start))
    for which, found in rates.items():
        found, base = found[1:], rates["mlx-lm"][1:]
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
        parts = []
        for _ in range(15):
            start = time.perf_counter()
            logits = sides[which](token)
            built = time.perf_counter()
            mx.async_eval(logits)
            sent = time.perf_counter()
            mx.synchronize()
            parts.append((built - start, sent - built, time.perf_counter() - sent))
        build, dispatch, wait = (1e3 * statistics.median(column) for column in zip(*parts, strict=True))
        print(
            f"{name}: {which:<9} x{ratio:.2f}, best over best x{max(found) / max(base):.2f}; tok/s "
            f"{statistics.median(found):.1f}, best {max(found):.1f}; ms build {build:.2f} dispatch {dispatch:.2f} "
            f"wait {wait:.2f}",
            flush=True,
        )
    for which in routes:
        for index, (mine, other) in enumerate(zip(caches[which], caches["mlx-lm"], strict=True)):
            if not (same_bits(mine.keys, other.keys) and same_bits(mine.values, other.values)):
                departs[which] = departs[which] or f"cache {index} differs at the end"
                print(f"{name}: {which}: {departs[which]}")
                break
    return not any(departs.values())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="e4b,12b,26b")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--reduced", action="store_true", help="toy widths without kernels, for a CPU")
    options = parser.parse_args()
    equal = True
    for size in options.sizes.split(","):
        try:
            equal = one(size, options.rounds, options.steps, options.tokens, options.reduced) and equal
        except Exception:
            equal = False
            traceback.print_exc(file=sys.stdout)
        gc.collect()
        mx.clear_cache()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
