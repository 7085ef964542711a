"""The scoreboard: straightline beside mlx-lm in one process, cell by cell, in short rounds that take turns.

The ratio comes first: a host slows down and speeds up within minutes, both sides alike. A side whose outputs are not
mlx-lm's, byte for byte, gets no ratio, unless the tier was chosen to be so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .progress import progress
from .show import indices

HELP = "tokens per second beside mlx-lm, where the bytes are equal"
CONTEXT = 600


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a folder or a hub id: its own weights")
    parser.add_argument("--random", metavar="NAME", help="random weights of a published architecture: gemma4-e4b")
    parser.add_argument(
        "--reduced", action=argparse.BooleanOptionalAction, help="with --random: toy widths (default on a CPU)"
    )
    parser.add_argument("--bits", choices=("4", "8", "mixed"), help="with --random: of the weights (default: 4)")
    cells = parser.add_argument_group("cells: every combination of these, one after the other on one model")
    cells.add_argument("--context", type=indices, metavar="N,..", help=f"tokens before (default: {CONTEXT})")
    cells.add_argument("--batch", type=indices, default=(1,), metavar="N,..", help="rows (default: 1)")
    cells.add_argument("--width", type=indices, default=(1,), metavar="L,..", help="tokens a call (default: 1)")
    cells.add_argument("--prefill", type=indices, default=(), metavar="N,..", help="prompts of so many tokens as well")
    cells.add_argument("--taps", type=indices, default=(), metavar="I,..", help="hidden states to keep in every cell")
    cells.add_argument("--suite", action="store_true", help="the standard set, after these")
    kv = parser.add_mutually_exclusive_group()
    kv.add_argument("--kv-config", metavar="FILE", help="how K/V are stored; auto: as the checkpoint says")
    kv.add_argument("--kv-bits", type=int, choices=(2, 3, 4, 6, 8), help="of all K/V, in groups of 64")
    parser.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        help="with fused kernels of straightline's own (default: on CUDA)",
    )
    parser.add_argument("--tier", choices=("exact", "fast"), default="exact", help="fast: bits may differ")
    parser.add_argument("--forward", action="store_true", help="the entry for any width as a third side")
    parser.add_argument("--steps", type=int, metavar="N", help="calls compared first (default: 64, suite 16)")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="calls of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, metavar="S", help="a cell, in place of --rounds (suite: 8)")
    parser.add_argument("--json", action="store_true", help="the record for a program")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a chart of the ratios as well")


def run(options: argparse.Namespace) -> int:
    _check(options)
    from ..benchmark import chart, report
    from ..benchmark.cells import grid, suite, suite_taps
    from ..benchmark.measures import bandwidth
    from ..benchmark.models import Wish, from_checkpoint, from_random
    from ..benchmark.race import Bench, Plan
    from ..verification.machine import describe

    wish = Wish(options.kv_config, options.kv_bits, options.kernels, options.tier)
    if options.checkpoint:
        pair = from_checkpoint(options.checkpoint, wish)
    else:
        pair = from_random(options.random, options.reduced, options.bits or "4", wish)
    taps = options.taps
    contexts = options.context or (() if options.prefill or options.suite else (CONTEXT,))
    cells = grid(contexts, options.batch, options.width, options.prefill, taps)
    if options.suite:
        cells += suite(taps or suite_taps(pair.spec.sentinel))
    rate, how = bandwidth()
    head = describe(None) | pair.facts | {"bandwidth": f"{rate / 1e9:.1f} GB/s, {how}"}
    if any(cell.taps for cell in cells):
        head["taps"] = ", ".join(map(str, next(cell.taps for cell in cells if cell.taps)))
    steps = options.steps or (16 if options.suite else 64)
    seconds = options.seconds or (8.0 if options.suite else None)
    bench = Bench(pair, Plan(steps, options.tokens, options.rounds, seconds), options.forward, options.tier, rate)
    rows: list[Any] = []
    with progress(len(cells), "cell", quiet=options.json) as bar:
        if not options.json:
            print("\n".join(f"{key:<12} {value}" for key, value in head.items()) + "\n", flush=True)
            print("\n".join(report.head()), flush=True)
        for cell in cells:
            found = bench.rows(cell)
            rows += found
            bar.update()
            if not options.json:
                bar.write("\n".join(report.lines(found)), file=sys.stdout)
                sys.stdout.flush()
    if options.json:
        print(json.dumps({"machine": head, "rows": [row.plain() for row in rows]}, indent=1))
    if options.svg is not None:
        from ..atomic import write_text

        write_text(options.svg, chart.chart(f"{pair.facts['model']} beside mlx-lm", head["device"], rows))
    return 1 if any(row.problem or (row.departs and not row.by_choice) for row in rows) else 0


def _check(options: argparse.Namespace) -> None:
    if (options.checkpoint is None) == (options.random is None):
        options.usage_error("name one CHECKPOINT, or --random NAME")
    if options.checkpoint and (options.reduced is not None or options.bits):
        options.usage_error("--reduced and --bits go with --random; a checkpoint is timed as it is")
    numbers = [*(options.context or ()), *options.batch, *options.width, *options.prefill]
    numbers += [options.tokens, options.rounds, 1 if options.steps is None else options.steps]
    if min(numbers) < 1:
        options.usage_error("--context, --batch, --width, --prefill, --tokens, --rounds and --steps must be 1 or more")
    if options.seconds is not None and not 0 < options.seconds < 1e6:
        options.usage_error("--seconds must be above 0 and below 1000000")
