"""The scoreboard: straightline beside mlx-lm in one process, cell by cell, in short rounds that take turns.

The ratio comes first: a host slows down and speeds up within minutes, both sides alike. A side whose outputs are not
mlx-lm's, byte for byte, gets no ratio, unless the tier was chosen to be so.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .ahead import expect_place
from .progress import progress
from .show import indices
from .sites import site_table

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
    cells.add_argument("--loop", action="store_true", help="generation at each context, by each side's own loop, too")
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
    parser.add_argument("--control", action="store_true", help="mlx-lm twice: what is noise on this machine")
    parser.add_argument("--steps", type=int, metavar="N", help="calls compared first (default: 64, suite 16)")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="calls of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, metavar="S", help="a cell, in place of --rounds (suite: 8)")
    parser.add_argument("--json", action="store_true", help="the record for a program")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a chart of the ratios as well")


def run(options: argparse.Namespace) -> int:
    _check(options)
    if options.svg is not None:
        expect_place(options.svg)
    from ..benchmark import report
    from ..benchmark.measures import bandwidth
    from ..benchmark.race import Bench, Plan
    from ..benchmark.sides import sides
    from ..decode_check import on_gpu
    from ..verification.machine import describe
    from ..verification.proof import decoding

    head = describe(None)
    if not options.json:
        _show(head)
    pair = _pair(options)
    cells = _cells(options, pair)
    rate, how = bandwidth()
    facts = pair.facts | {"bandwidth": f"{rate / 1e9:.1f} GB/s, {how}"}
    tapped = next((cell.taps for cell in cells if cell.taps), ())
    if tapped:
        facts["taps"] = ", ".join(map(str, tapped))
    if not options.json:
        _show(facts)
        print("\n".join(["fused sites", *site_table(pair.sites), "", *report.head()]), flush=True)
    steps = options.steps or (16 if options.suite else 64)
    seconds = options.seconds or (8.0 if options.suite else None)
    plan = Plan(steps, options.tokens, options.rounds, seconds)
    bench = Bench(pair, plan, sides(pair, options.forward, options.control, on_gpu()), options.tier, rate)
    rows: list[Any] = []
    with progress(len(cells), "cell", quiet=options.json) as bar:
        for cell in cells:
            found = bench.rows(cell)
            rows += found
            bar.update()
            if not options.json:
                bar.write("\n".join(report.lines(found)), file=sys.stdout)
                sys.stdout.flush()
    # Whether blocks of a shape are exact is not known before one comes.
    late = {key: value for key, value in decoding(pair.model).items() if facts.get(key) != value}
    if late and not options.json:
        print()
        _show(late)
    facts |= late
    if options.json:
        sites = [asdict(one) for one in pair.sites]
        record = {"machine": head | facts, "fused_sites": sites, "rows": [row.plain() for row in rows]}
        print(json.dumps(record, indent=1))
    if options.svg is not None:
        from ..atomic import write_text
        from ..benchmark.chart import chart

        write_text(options.svg, chart(f"{pair.facts['model']} beside mlx-lm", _caption(options), rows))
    return 1 if any(row.problem or (row.departs and not row.by_choice) for row in rows) else 0


def _pair(options: argparse.Namespace) -> Any:
    from ..benchmark.models import Wish, from_checkpoint, from_random

    wish = Wish(options.kv_config, options.kv_bits, options.kernels, options.tier, options.taps)
    if options.checkpoint:
        return from_checkpoint(options.checkpoint, wish)
    return from_random(options.random, options.reduced, options.bits or "4", wish)


def _cells(options: argparse.Namespace, pair: Any) -> list[Any]:
    from ..benchmark.cells import grid, suite, suite_taps

    contexts = options.context or (() if options.prefill or options.suite else (CONTEXT,))
    cells = grid(contexts, options.batch, options.width, options.prefill, options.taps, options.loop)
    if options.suite:
        standard = suite(options.taps or suite_taps(pair.spec.sentinel))
        # mlx-lm's loop has plain K/V only.
        cells += [cell for cell in standard if not cell.loop or pair.kv_config is None]
    return cells


def _caption(options: argparse.Namespace) -> str:
    import mlx.core as mx

    device = mx.device_info().get("device_name", str(mx.default_device()))
    return f"{device}, {options.tier} tier: mlx-lm's time over ours, median of the rounds, whiskers the quartiles"


def _show(facts: dict[str, str]) -> None:
    print("\n".join(f"{key:<12} {value}" for key, value in facts.items()), flush=True)


def _check(options: argparse.Namespace) -> None:
    if (options.checkpoint is None) == (options.random is None):
        options.usage_error("name one CHECKPOINT, or --random NAME")
    if options.checkpoint and (options.reduced is not None or options.bits):
        options.usage_error("--reduced and --bits go with --random; a checkpoint is timed as it is")
    if options.loop and (options.kv_config or options.kv_bits):
        options.usage_error("--loop goes with plain K/V; mlx-lm's loop has no others for sliding layers")
    numbers = [*(options.context or ()), *options.batch, *options.width, *options.prefill]
    numbers += [options.tokens, options.rounds, 1 if options.steps is None else options.steps]
    if min(numbers) < 1:
        options.usage_error("--context, --batch, --width, --prefill, --tokens, --rounds and --steps must be 1 or more")
    if options.seconds is not None and not 0 < options.seconds < 1e6:
        options.usage_error("--seconds must be above 0 and below 1000000")
