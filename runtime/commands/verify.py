"""Prove on this machine that the generated file is bit-equal to mlx-lm: logits, caches and taps, byte for byte.

The report is made to be pasted into an issue. Exit code 1 if anything departs.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from .progress import progress
from .sites import site_table

HELP = "prove bit-equality on this machine, with a checkpoint or with random weights"


SEEDS = 1 << 63  # some more are drawn by adding to it
MOST_STEPS = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a folder or a hub id: its own weights")
    parser.add_argument("--random", metavar="NAME", help="random weights of a published architecture: gemma4-e4b")
    parser.add_argument(
        "--reduced",
        action=argparse.BooleanOptionalAction,
        help="with --random: toy widths, vocabulary, window and experts, the layers as published "
        "(default on a CPU; needs the codegen extra)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="with --random: this many layers (needs codegen)")
    parser.add_argument("--seed", type=int, default=7, metavar="S", help="of weights and tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="tokens of each decode cell (default: 32, reduced 2)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="with --random (bfloat16; reduced on a CPU float32)",
    )
    parser.add_argument("--spoil", action="store_true", help="change one weight by one bit: must end with exit code 1")
    parser.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        help="decode with fused kernels of straightline's own (default: on CUDA)",
    )
    parser.add_argument("--json", action="store_true", help="the report for a program")
    parser.add_argument(
        "--tier",
        choices=("exact", "fast"),
        default="exact",
        help="fast: not bits, but how far that tier and the exact one are from the model in float32",
    )


def run(options: argparse.Namespace) -> int:
    if (options.checkpoint is None) == (options.random is None):
        options.usage_error("name one CHECKPOINT, or --random NAME")
    if options.checkpoint and (options.layers or options.dtype or options.reduced):
        options.usage_error("--layers, --dtype and --reduced go with --random; a checkpoint is verified as it is")
    if (options.steps is not None and options.steps < 1) or (options.layers is not None and options.layers < 2):
        options.usage_error("--steps must be 1 or more, and --layers 2 or more")
    if not 0 <= options.seed < SEEDS or (options.steps or 0) > MOST_STEPS:
        options.usage_error(f"--seed must be from 0 to {SEEDS - 1}, and --steps at most {MOST_STEPS}")
    if options.tier == "fast":
        if options.spoil:
            options.usage_error("--spoil goes with the exact tier; the fast one has no bits to spoil")
        from .verify_tier import run as run_tier

        return run_tier(options)
    from ..kernels.states import running
    from ..verification.cells import cell_count, cells
    from ..verification.control import spoil
    from ..verification.machine import describe
    from ..verification.proof import from_checkpoint, from_random, with_kernels

    if options.checkpoint:
        proof = from_checkpoint(options.checkpoint)
    else:
        proof = from_random(options.random, options.reduced, options.layers, options.dtype, options.seed)
    if options.kernels is not None:
        proof = with_kernels(proof, options.kernels)
    if options.spoil:
        spoil(proof.model)
    steps = options.steps or proof.steps
    head = describe(None) | proof.facts | {"seed": str(options.seed)}
    sites = tuple(dict.fromkeys(running(proof.model) + running(proof.quantized)))
    if not options.json:
        print("\n".join(f"{key:<12} {value}" for key, value in head.items()))
        print("\n".join(["fused sites", *site_table(sites)]) + "\n", flush=True)
    rows = []
    with progress(cell_count(proof, steps), "cell", quiet=options.json) as bar:
        for row in cells(proof, steps, options.seed):
            rows.append(row)
            bar.update()
            if not options.json:
                bar.write(f"  {row.cell:<38} {row.departs or row.passed:<8} {row.seconds:7.2f} s", file=sys.stdout)
                sys.stdout.flush()
    departed = [row for row in rows if row.departs]
    if options.json:
        found = {"machine": head, "fused_sites": [asdict(one) for one in sites]}
        print(json.dumps(found | {"cells": [_plain(row) for row in rows], "equal": not departed}, indent=1))
    else:
        print(f"\n{_verdict(rows, departed)}")
    return 1 if departed else 0


def _plain(row: Any) -> dict[str, Any]:
    result = "departs" if row.departs else row.passed.partition(":")[0]
    where = row.departs or row.passed.partition(": ")[2]
    return {"cell": row.cell, "result": result, "where": where, "seconds": round(row.seconds, 3)}


def _verdict(rows: list[Any], departed: list[Any]) -> str:
    if departed:
        first = departed[0]
        return f"DEPARTS in {len(departed)} of {len(rows)} cells, first in {first.cell}: {first.departs}"
    by_hand, cannot = (sum(row.passed.startswith(word) for row in rows) for word in ("monolith", "cannot"))
    more = f"; {by_hand} went to mlx-lm's own code" if by_hand else ""
    more += f"; {cannot} that mlx-lm itself cannot run on this device" if cannot else ""
    return f"equal: {len(rows) - by_hand - cannot} of {len(rows)} cells, every byte of logits, caches and taps{more}"
