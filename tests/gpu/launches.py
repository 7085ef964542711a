"""How many kernels a token takes and how long each runs, by torch's profiler (it sees MLX's, too), beside the
primitives of its graph.

Random 4-bit weights of full size, one token a call; downloads nothing. On an H200 90 s were enough for two sizes. Where
torch has no CUDA the graph is all there is. --reduced: toys, for a CPU. Exits with 1 if the profiler shows no kernels.

    . tests/gpu/path.sh && python3 tests/gpu/launches.py
"""

import argparse
import gc
import re
import statistics
import sys
import time
import traceback
from typing import Any, NamedTuple

import mlx.core as mx
from machine import describe

from straightline.runtime.benchmark.calls import Blocks, greedy, ids
from straightline.runtime.benchmark.cells import Cell
from straightline.runtime.benchmark.models import Wish, from_random
from straightline.runtime.benchmark.sides import Side, fill, sides

SIZES = ("e4b", "12b", "26b")
CONTEXTS = {"e4b": 600, "e2b": 600}
TOKENS = 8
SHOWN = 16  # of the kernels, those that take most
PAUSE = 0.3  # seconds between two sides, from which the record tells them apart


class Ran(NamedTuple):
    """One run of a kernel; took: microseconds."""

    name: str
    took: float


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for key, value in describe(options.commit).items():
        print(f"{key:<9} {value}", flush=True)
    profile, wrong = profiler(), 0
    for size in options.sizes.split(","):
        try:
            wrong += count(size, options, profile)
        except Exception:  # the next size may still tell something
            traceback.print_exc(file=sys.stdout)
            wrong += 1
        gc.collect()
        mx.clear_cache()
    return int(wrong > 0)


def count(size: str, options: argparse.Namespace, profile: Any) -> int:
    """One line a side. 1 if the record shows no kernels of each side."""
    pair = from_random(f"gemma4-{size}", options.reduced, "4", Wish(None, None, options.kernels, "exact"))
    cell = Cell(options.context or CONTEXTS.get(size, 1100))
    found, warm = {}, {}
    for side in sides(pair):
        caches = side.caches()
        fill(side, ids(1, cell.context, pair.spec.vocab_size), caches)
        calls = Blocks(cell, pair.spec.vocab_size, {side.name: caches})
        found[side] = calls.graph(side)
        warm[side] = decode(side, calls.first, caches, 2 * TOKENS)
    kernels = profiled(profile, warm) if profile else {}
    for side, graph in found.items():
        ran = kernels.get(side, ())
        busy = sum(one.took for one in ran) / TOKENS
        told = f"; {len(ran) / TOKENS:.1f} kernels, {busy:.0f} us of them" if ran else ""
        print(f"{size} {side.name:<13} {graph.primitives} primitives, {graph.launching} launching{told}", flush=True)
        table: dict[str, list[float]] = {}
        for one in ran:
            table.setdefault(one.name, []).append(one.took)
        for name, took in sorted(table.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
            middle, longest = statistics.median(took), max(took)
            told = f"{sum(took) / TOKENS:8.1f} us {len(took) / TOKENS:6.1f} times"
            print(f"      {told}, median {middle:.1f}, longest {longest:.1f}  {name[:90]}")
    return int(bool(profile) and not kernels)


def decode(side: Side, token: mx.array, caches: list[Any], tokens: int) -> tuple[mx.array, list[Any]]:
    """The token to go on with."""
    for _ in range(tokens):
        token = greedy(side.call(token, caches, None))
        mx.eval(token)
    mx.synchronize()
    return token, caches


def profiled(profile: Any, warm: dict[Side, tuple[mx.array, list[Any]]]) -> dict[Side, list[Ran]]:
    """Name and microseconds of each side's kernels, the greedy choice of the token among them."""
    with profile() as record:
        for side, (token, caches) in warm.items():
            decode(side, token, caches, TOKENS)
            time.sleep(PAUSE)
    events = [one for one in record.events() if str(one.device_type).endswith("CUDA")]
    events = [one for one in events if not re.search("memcpy|memset", one.name, re.IGNORECASE)]
    groups: list[list[Ran]] = []
    end = float("-inf")
    for event in sorted(events, key=lambda one: one.time_range.start):
        if event.time_range.start - end > 1e6 * PAUSE / 2:
            groups.append([])
        groups[-1].append(Ran(event.name, event.time_range.elapsed_us()))
        end = event.time_range.end
    if len(groups) != len(warm):
        print(f"profiler: {len(groups)} groups of kernels for {len(warm)} sides", flush=True)
        return {}
    return dict(zip(warm, groups, strict=True))


def profiler() -> Any:
    """A context that records what runs on the GPU, or None."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.zeros(1).cuda()
    except Exception as error:
        print(f"no profiler: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        return None
    return lambda: profile(activities=[ProfilerActivity.CUDA])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="which, in order (default: %(default)s)")
    parser.add_argument("--context", type=int, help="tokens before (default: 600 for E sizes, else 1100)")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, help="as specialize's (default: on CUDA)")
    parser.add_argument("--reduced", action="store_true", default=None, help="toy widths, for a CPU")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
