"""Decoding into the caches' own rows, at full size on a GPU: bits beside mlx-lm's, then speed. About 60 s a size.

Exits with 1 if any differ.

python3 tests/gpu/in_place.py --sizes e4b,12b,26b --rounds 6 --steps 32
"""

import argparse
import gc
import sys
import time
import traceback
from typing import Any

import mlx.core as mx
from ways import CONTEXT, copied, equal, speed

from straightline.runtime import specialize
from straightline.runtime.arrays import same_bits
from straightline.runtime.in_place import InPlace
from straightline.runtime.kernels import report
from straightline.runtime.verification.proof import from_random


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
    token, departs = equal(name, sides, caches, steps)
    speed(name, sides, token, rounds, tokens)
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
