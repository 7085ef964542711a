"""Proves on the default device that generated files are bit-equal to mlx-lm at full size, with random 4-bit weights.

Reads codegen/specs/*.config.json and the committed generated/*.py; downloads nothing. Prints a record; exits with 1 if
anything departs. See README.md beside this file for how to run it.
"""

import argparse
import gc
import hashlib
import importlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from machine import ROOT, describe

from straightline.runtime import load_generated, specialize
from straightline.runtime.verification.control import control, spoil
from straightline.runtime.verification.random_model import build, size_in_gb
from straightline.runtime.verification.smaller import cut
from straightline.runtime.verification.walks import Row, run_walk, walks

SIZES = ("e4b", "12b", "26b", "e2b", "31b")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    record: dict[str, Any] = {"machine": describe(options.commit), "sizes": {}}
    for key, value in record["machine"].items():
        print(f"{key:<9} {value}", flush=True)
    start = time.perf_counter()
    for size in options.sizes:
        rows = record["sizes"][size] = []
        try:
            for row in check_size(size, options):
                rows.append(vars(row))
        except Exception as error:  # the next size may still tell something
            traceback.print_exc()
            rows.append(vars(Row("stopped", f"{type(error).__name__}: {error}", 0.0)))
        gc.collect()
        mx.clear_cache()
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    departed = [
        (size, row)
        for size, rows in record["sizes"].items()
        for row in rows
        if row["departs"] or row["passed"].startswith("cannot")
    ]
    for size, row in departed:
        print(f"DEPARTS {size}: {row['cell']}: {row['departs'] or row['passed']}")
    cells = sum(map(len, record["sizes"].values()))
    print(f"{cells - len(departed)} of {cells} cells pass, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if departed or not cells else 0


def check_size(size: str, options: argparse.Namespace) -> Iterator[Row]:
    """Rows as they come, each printed."""
    start = time.perf_counter()
    mx.reset_peak_memory()
    config = config_of(size, options)
    text = config.get("text_config", config)
    built, oracle = build(config, getattr(mx, options.dtype))
    file = generated_file(size, config, options)
    model = specialize(built, file, strict=True)
    print(
        f"\n== {size}: {file.__name__} (fingerprint {file.FINGERPRINT}{digest(file)}), "
        f"{len(oracle.layers)} layers, window {text['sliding_window']}, {size_in_gb(oracle):.2f} GB, "
        f"built in {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    if options.spoil:
        spoil(model)
    for seed, walk in enumerate(walks(text["sliding_window"], options.steps)):
        for row in run_walk(walk, oracle, model, text["vocab_size"], seed):
            yield shown(row)
    if model.dispatch.counts["monolith"]:
        yield shown(Row("dispatch", f"{model.dispatch.counts}: calls went to the monolith", 0.0))
    yield shown(control(oracle, model, text["vocab_size"]))
    print(
        f"   generated calls {model.dispatch.counts['generated']}, peak {mx.get_peak_memory() / 1e9:.1f} GB", flush=True
    )


def shown(row: Row) -> Row:
    print(f"   {row.cell:<36} {row.departs or row.passed:<8} {row.seconds:7.2f} s", flush=True)
    return row


def config_of(size: str, options: argparse.Namespace) -> dict[str, Any]:
    if options.toy:
        sys.path.insert(0, str(ROOT / "tests"))
        from toys import SHAPES

        return dict(SHAPES[size])
    config = json.loads((ROOT / f"codegen/specs/gemma4_{size}.config.json").read_text())
    return cut(config, options.layers, options.vocab, options.window)


def generated_file(size: str, config: dict[str, Any], options: argparse.Namespace) -> ModuleType:
    """The committed file; for a config that is not a published one, a file made now (needs the codegen extra)."""
    if not options.made_now:
        return importlib.import_module(f"straightline.generated.gemma4_{size}")
    from straightline.codegen import generate

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"cut_{size}.py")
        path.write_text(generate(config, f"cut-{size}"))
        return load_generated(path)


def digest(file: ModuleType) -> str:
    path = Path(str(file.__file__))
    return f", sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" if path.exists() else ""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="which, in order (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="single-token steps of each decode cell (default: 32)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", type=Path, help="write the record here, after each size")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    parser.add_argument("--spoil", action="store_true", help="change one generated weight by one bit: must exit with 1")
    cuts = parser.add_argument_group("smaller models, whose files are generated first (needs the codegen extra)")
    cuts.add_argument("--toy", action="store_true", help="the shapes of tests/toys.py")
    cuts.add_argument("--layers", type=int, help="this many layers, sliding and full by turns")
    cuts.add_argument("--vocab", type=int, help="this many tokens")
    cuts.add_argument("--window", type=int, help="this window; the lengths follow it")
    options = parser.parse_args(arguments)
    options.sizes = options.sizes.split(",")
    for size in options.sizes:
        if size not in SIZES:
            parser.error(f"--sizes has {size!r}; expected some of {','.join(SIZES)}")
    options.made_now = options.toy or any(one is not None for one in (options.layers, options.vocab, options.window))
    return options


if __name__ == "__main__":
    sys.exit(main())
