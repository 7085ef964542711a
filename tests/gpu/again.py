"""Is a block of tokens the same every time? E4B's, with random weights, in a process that has done other things before.

    . tests/gpu/path.sh && python3 tests/gpu/again.py

Asks what is asked before blocks of a shape serve (runtime/decode_check.py), again and again: of a block beside
`forward`, and of `forward` beside itself. If the latter ever differs, the cause is not straightline's. A line a shape
and question, with what differed; exits with 1 if anything did. On a bare machine MLX compiles for a minute first.
"""

import argparse
import copy
import sys
from functools import partial
from typing import Any

import mlx.core as mx
from machine import describe

from straightline.runtime import decode_check, specialize
from straightline.runtime.kv.make import caches_for
from straightline.runtime.taps import no_tap
from straightline.runtime.verification.proof import from_random

SHAPES = ((1, 4), (1, 8), (1, 16), (1, 32), (4, 8), (16, 1))  # batch, width; MLX has another product from 8 rows on
TIMES = 15
CONTEXTS = (512, 600)
SINGLE = 40


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    if not mx.cuda.is_available():
        sys.exit("this compares kernels on CUDA, and there is no CUDA device here")
    for key, value in describe(None).items():
        print(f"{key:<9} {value}", flush=True)
    proof = from_random("gemma4-e4b", False, None, None, 7)
    model = specialize(proof.model, strict=True, kernels=True)
    for one in (proof.oracle, model):
        use(one)
    bound: Any = model._bound
    route = next(one for one in bound.routes if one.blocks is not None)
    differing = sum(again(bound, route, shape) for shape in SHAPES)
    print(f"{differing} of {2 * TIMES * len(SHAPES)} differ")
    return int(differing > 0)


def use(model: Any) -> None:
    """As a bench does before it comes to blocks, so that memory has been used and given back."""
    for context in CONTEXTS:
        caches = model.make_cache()
        mx.eval(model(mx.arange(context)[None], cache=caches))
        for token in range(SINGLE):
            mx.async_eval(model(mx.array([[token]]), cache=caches))  # type: ignore[no-untyped-call]
        for width in (2, 4, 8):
            mx.eval(model(mx.arange(width)[None], cache=caches))


def again(bound: Any, route: Any, shape: tuple[int, int]) -> int:
    """How many attempts differ."""
    make_caches = partial(caches_for, route.blocks.file.CACHES)
    weights, vocabulary, found = bound.weights, bound.vocabulary, 0

    def twins() -> tuple[list[Any], list[Any]]:
        one = decode_check.after_prompt(weights, route, make_caches(), shape[0], decode_check.PROMPT, vocabulary)
        return one, copy.deepcopy(one)

    def itself(ids: mx.array, caches: list[Any]) -> mx.array:
        logits: mx.array = route.forward(weights, ids, caches, no_tap)
        return logits

    of_blocks = bound.of_blocks[shape[1] > 1]
    questions = {
        "forward beside itself": partial(decode_check._refused, weights, route, twins, shape, itself, vocabulary),
        "block beside forward": partial(
            decode_check.block_refused, weights, of_blocks, route, shape, False, make_caches, vocabulary
        ),
    }
    for name, ask in questions.items():
        reasons = [reason for _ in range(TIMES) if (reason := ask())]
        found += len(reasons)
        print(f"{f'{shape[0]} by {shape[1]}':<8} {name:<22} {len(reasons)} of {TIMES} differ", flush=True)
        for reason in reasons[:3]:
            print(f"    {reason}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
