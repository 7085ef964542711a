"""The three OptiQ files at full size: generated beside mlx-lm with quantized K/V, byte for byte. 2 to 4 minutes (H200).

    . tests/gpu/path.sh
    python3 tests/gpu/optiq.py                      # --sizes e4b --steps 8; --limit 40: seconds for each size
    python3 tests/gpu/optiq.py --toy --dtype float32     # on a CPU

Much of the time is MLX's, which compiles some kernels anew in every process. So the widths are few, and what
memory_32k.py measures is measured here too, of the 12B.

Random 4-bit weights, no norm or scalar at its initial value. Caches are those of make_cache(model, kv_config). Each
call is made four times, each with its own caches: mlx-lm, generated, and both again with every layer tapped; logits,
taps and everything that the caches hold are compared. A cell is `equal`, or says where the first difference is, or why
it could not run. Exits with 1 unless all are equal.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from machine import ROOT, describe
from memory_32k import memory

from straightline.codegen.config import read_config
from straightline.runtime import load_generated, specialize
from straightline.runtime.verification.random_model import build, size_in_gb
from straightline.runtime.verification.walks import Row, Walk, run_walk

SIZES = ("12b", "e4b", "26b")
LONGEST = 60  # of the text of an error


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for key, value in describe(options.commit).items():
        print(f"{key:<9} {value}", flush=True)
    mx.set_cache_limit(4 << 30)  # others may be on this GPU
    start, rows = time.perf_counter(), []
    for size in options.sizes:
        try:
            for row in check(size, options):
                rows.append(row)  # one by one: what was seen before an error counts
        except Exception as error:  # the next size may still tell something
            traceback.print_exc()
            rows.append(Row(size, f"stopped: {type(error).__name__}: {str(error)[:LONGEST]}", 0.0))
        gc.collect()
        mx.clear_cache()
    wrong = [row for row in rows if row.departs or row.passed != "equal"]
    print(f"{len(rows) - len(wrong)} of {len(rows)} cells equal, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if wrong or not rows else 0


def walks(window: int, steps: int) -> tuple[Walk, ...]:
    """The most telling first. Single tokens come in thirds: before and across the first, second and third wrap.

    No width lies between 8 and 32, for which MLX would have other kernels to compile.
    """
    near, chunk, third = window - min(10, window // 3), min(256, window // 2), (1,) * -(-steps // 3)
    again = window - len(third)
    chunks = (chunk,) * (2 * window // chunk) + (chunk // 2 + 1,)
    around = (
        ("prefill inside, decode across the wrap", (near, *third)),
        ("a chunk, decode across the second wrap", (again, *third)),
        ("a chunk, decode across the third wrap", (again, *third)),
        ("blocks of 4 past", (4,) * 4),
    )
    return (
        Walk(around, caches="kv"),
        Walk((("prefill past the window, one pass", (window + chunk,)), ("decode after it", (1,) * 4)), caches="kv"),
        Walk((("blocks of 4 across the wrap", (near, *(4,) * 6)),), caches="kv"),
        Walk((("rollback: blocks half taken back", (near, *(4,) * 6, 6, 1)),), caches="kv rollback"),
        Walk(((f"chunks of {chunk}", chunks), ("decode after them", (1,) * 4)), caches="kv"),
        Walk((("batch of 2: prefill inside", (near,)), ("batch of 2: decode, a block", (1, 1, 2))), 2, "kv"),
    )


def check(size: str, options: argparse.Namespace) -> Iterator[Row]:
    start = time.perf_counter()
    mx.reset_peak_memory()
    config, kv_config, file = subject(size, options)
    text = config.get("text_config", config)
    built, oracle = build(config, getattr(mx, options.dtype))
    model = specialize(built, file, strict=True, kernels=options.kernels)
    print(
        f"\n== {size}: {len(oracle.layers)} layers, window {text['sliding_window']}, {size_in_gb(oracle):.2f} GB, "
        f"built in {time.perf_counter() - start:.1f} s; single tokens by "
        f"{'forward: ' + model.dispatch.decode_reason if model.dispatch.decode_reason else 'decode'}",
        flush=True,
    )
    start = time.perf_counter()
    cells = (
        row
        for seed, walk in enumerate(walks(text["sliding_window"], options.steps))
        for row in run_walk(walk, oracle, model, text["vocab_size"], seed, kv_config)
    )
    for row in cells:
        print(f"   {row.cell:<40} {row.departs or row.passed:<8} {row.seconds:7.2f} s", flush=True)
        yield row
        if time.perf_counter() - start > options.limit:
            print("   any further cells are left out: out of time", flush=True)
            break
    counts, served = model.dispatch.counts, model.dispatch.file
    print(f"   {counts['generated']} calls generated, {counts['monolith']} by mlx-lm's code ({served})", flush=True)
    print(f"   peak {mx.get_peak_memory() / 1e9:.1f} GB", flush=True)
    if size == "12b" and options.tokens and not options.toy:
        cells.close()  # and with it the caches of the walk
        wrong = memory(model, read_config(config), kv_config, options.tokens, 2048, options.limit)
        yield Row("12b: memory", f"{wrong} measures failed" if wrong else "", 0.0)
    if counts["monolith"]:
        yield Row(f"{size}: dispatch", f"{model.dispatch.reasons}", 0.0)


def subject(size: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, int]], Any]:
    """config.json, kv_config and, for a toy, a file made now."""
    if not options.toy:
        config, kv_config = (
            json.loads((ROOT / f"codegen/specs/gemma4_{size}_optiq.{kind}.json").read_text())
            for kind in ("config", "kv_config")
        )
        return config, kv_config, None
    sys.path.insert(0, str(ROOT / "tests"))
    from toys import SHAPES

    from straightline.codegen import generate

    config = dict(SHAPES[size])
    kv_config = [
        {"layer_idx": layer, "bits": 8 if layer % 2 else 4, "group_size": 32} for layer in read_config(config).owners
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"toy_{size}.py")
        path.write_text(generate(config, f"toy-{size}", kv_config=kv_config))
        return config, kv_config, load_generated(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="which, in order (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="single tokens around the three wraps (default: 64)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each size; then the next (default: 60)")
    parser.add_argument("--tokens", type=int, default=32768, help="of the 12B's memory; 0: leave it out")
    parser.add_argument(
        "--kernels", action="store_true", help="with fused kernels, which take a minute to compile once"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    parser.add_argument("--toy", action="store_true", help="small models (needs the codegen extra)")
    options = parser.parse_args(arguments)
    options.sizes = options.sizes.split(",")
    return options


if __name__ == "__main__":
    sys.exit(main())
