"""Decode one token at a time beside mlx-lm, in one process, in short rounds that take turns.

The ratio comes first: a host slows down and speeds up within minutes, both sides alike. A side whose logits are not
mlx-lm's, byte for byte, gets no ratio.
"""

import argparse
import json
from typing import Any

from .progress import progress

HELP = "tokens per second beside mlx-lm, where the bytes are equal"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a folder or a hub id: its own weights")
    parser.add_argument("--random", metavar="NAME", help="random weights of a published architecture: gemma4-e4b")
    parser.add_argument("--reduced", action=argparse.BooleanOptionalAction, help="with --random: toy sizes")
    parser.add_argument("--context", type=int, default=600, metavar="N", help="tokens before (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="tokens of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="of each side (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="compared first (default: %(default)s)")
    parser.add_argument("--kernels", action="store_true", help="with fused kernels of straightline's own")
    parser.add_argument("--json", action="store_true", help="the record for a program")


def run(options: argparse.Namespace) -> int:
    if (options.checkpoint is None) == (options.random is None):
        options.usage_error("name one CHECKPOINT, or --random NAME")
    if options.checkpoint and options.reduced is not None:
        options.usage_error("--reduced goes with --random; a checkpoint is timed as it is")
    if min(options.context, options.tokens, options.rounds, options.steps) < 1:
        options.usage_error("--context, --tokens, --rounds and --steps must be 1 or more")
    from ..verification.machine import describe
    from ..verification.proof import from_checkpoint, from_random
    from ..verification.timing import Race

    if options.checkpoint:
        proof = from_checkpoint(options.checkpoint)
    else:
        proof = from_random(options.random, options.reduced, None, None, 7)
    race = Race(proof.oracle, proof.model, proof.vocabulary, options.context, options.kernels)
    head = describe(None) | proof.facts | {"context": str(options.context)} | race.facts
    race.compare(options.steps)
    with progress(options.rounds, "round", quiet=options.json) as bar:
        for _ in range(options.rounds):
            race.round(options.tokens)
            bar.update()
    rows = race.results()
    if options.json:
        print(json.dumps({"machine": head, "sides": rows}, indent=1))
    else:
        print("\n".join(f"{key:<12} {value}" for key, value in head.items()) + "\n")
        print("\n".join(_line(row) for row in rows))
    return 1 if any(row["departs"] for row in rows) else 0


def _line(row: dict[str, Any]) -> str:
    if row["departs"]:
        return f"{row['side']:<8} departs from mlx-lm at {row['departs']}"
    return (
        f"{row['side']:<8} x{row['ratio']:.2f} [{row['ratio_q25']:.2f}-{row['ratio_q75']:.2f}], best over best "
        f"x{row['best_over_best']:.2f}; tok/s {row['median']:.1f}, best {row['best']:.1f}; "
        f"{row['primitives']} primitives; ms: build {row['build']:.2f}, dispatch {row['dispatch']:.2f}, "
        f"wait {row['wait']:.2f}; peak {row['peak_gb']:.2f} GB; equal at {row['compared']} steps"
    )
