"""What single parts of `decode` give: products joined with their readers, kernels for more or fewer products; beside
mlx-lm's, at full size on a GPU. Bits first, then speed. About 50 s a size; exits with 1 if any differ.

    . tests/gpu/path.sh && python3 tests/gpu/joint.py --sizes e4b,12b,26b
"""

import argparse
import gc
import sys
import time
import traceback
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
from machine import describe
from ways import CONTEXT, copied, equal, speed

from straightline.runtime import bound, products, specialize
from straightline.runtime.joint import find_joints
from straightline.runtime.kernels import Attention, PerLayerEnd, ProductHeads
from straightline.runtime.kernels.states import running
from straightline.runtime.products import LARGE
from straightline.runtime.verification.proof import from_random


class Way(NamedTuple):
    """joints: which kinds. large: MiB from which a product has a kernel of ours. scores: whether attention's have."""

    joints: tuple[type, ...]
    large: int = LARGE >> 20
    scores: bool = True


BOTH = (ProductHeads, PerLayerEnd)
OVER_VIEWS = Attention.over_views
WAYS = {
    "apart": Way(()),
    "heads": Way((ProductHeads,)),
    "ends": Way((PerLayerEnd,)),
    "all": Way(BOTH),
    "all, scores apart": Way(BOTH, scores=False),
    "all, large 14": Way(BOTH, 14),
    "all, large 2": Way(BOTH, 2),
}


def main() -> int:
    options = parse()
    for key, value in describe(options.commit).items():
        print(f"{key:<9} {value}", flush=True)
    wrong = 0
    for size in options.sizes.split(","):
        try:
            wrong += not race(size, options)
        except Exception:  # the next size may still tell something
            traceback.print_exc(file=sys.stdout)
            wrong += 1
        gc.collect()
        mx.clear_cache()
    return int(wrong > 0)


def race(size: str, options: argparse.Namespace) -> bool:
    """Whether everything was equal."""
    started = time.perf_counter()
    proof = from_random(f"gemma4-{size}", options.reduced, None, None, 7)
    models = {name: specialized(proof.model, name, options) for name in options.ways.split(";")}
    print(f"{size}: {time.perf_counter() - started:.1f} s to build and specialize", flush=True)
    for one in running(list(models.values())[-1]):
        if ", " in one.name or one.state == "plain":
            print(f"  {one.state:<12} {one.name:<36} {one.reason[:60]:<60} {one.site:.150}")
    length = 20 if options.reduced else options.context or CONTEXT[size]
    prompt = mx.array([[(7919 * index) % proof.vocabulary for index in range(length)]])
    filled = proof.oracle.make_cache()
    mx.eval(proof.oracle(prompt, cache=filled), [cache.state[:2] for cache in filled])
    callables: dict[str, Any] = {"mlx-lm": proof.oracle, **models}
    caches = {name: copied(filled, proof.oracle.make_cache) for name in callables}
    sides = {name: partial(model, cache=caches[name]) for name, model in callables.items()}
    token, departs = equal(size, sides, caches, options.steps)
    if any(departs.values()):
        return False
    speed(size, sides, token, options.rounds, options.tokens)
    return True


def specialized(model: Any, name: str, options: argparse.Namespace) -> Any:
    """The model, decoding in this way."""
    way = WAYS[name]

    def some(*arguments: Any) -> Any:
        return tuple(joint for joint in find_joints(*arguments) if isinstance(joint.site, way.joints))

    def over_views(site: Attention, scores: Any) -> Any:
        return OVER_VIEWS(site, scores if way.scores else site.scores.plain)

    with (
        mock.patch.object(bound, "find_joints", some),
        mock.patch.object(products, "LARGE", way.large << 20),
        mock.patch.object(Attention, "over_views", over_views),
    ):
        made = specialize(model, strict=True, kernels=not options.reduced)
    told = made.dispatch
    reasons = [told.decode_reason, told.kernels_reason, told.in_place_reason, told.compiled_reason]
    print(f"  {name}: {', '.join(filter(None, reasons)) or 'decode in place, compiled'}", flush=True)
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default="e4b,12b,26b", help="which, in order (default: %(default)s)")
    parser.add_argument("--ways", default=";".join(WAYS), help="which, by semicolons (default: %(default)s)")
    parser.add_argument("--context", type=int, help="tokens before (default: 600 or 1100)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--reduced", action="store_true", help="toy widths without kernels, for a CPU")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
