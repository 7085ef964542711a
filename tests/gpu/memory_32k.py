"""What the 12B's kv_config saves at 32k tokens: cache bytes against the formula, and memory of the device. About 60 s.

    . tests/gpu/path.sh
    python3 tests/gpu/memory_32k.py                 # --tokens 8192 --chunk 1024; --size e4b; --toy on a CPU
    python3 tests/gpu/memory_32k.py --limit 60      # seconds for each prompt, which then ends where it is

Random 4-bit weights. A prompt in chunks, as mlx-lm's generator computes it (caches are evaluated, logits are not), then
single tokens. First with plain caches, then with make_cache(model, kv_config), each by the generated file.

The formula, for each layer that owns K/V: 2 x KV heads x rows x head size x (bits / 8 + 4 / group) bytes, or 2 bytes a
number where it is plain (bfloat16). Rows: in a full layer the tokens, rounded up to 256; in a ring the window.
"""

import argparse
import gc
import json
import sys
import time
from typing import Any

import mlx.core as mx
from machine import ROOT, describe

from straightline.codegen.config import read_config
from straightline.codegen.kv import read_kv_config
from straightline.codegen.spec import Attention, Spec
from straightline.runtime import make_cache, specialize
from straightline.runtime.verification.random_model import build, size_in_gb

STEP = 256
DECODED = 8


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for key, value in describe(options.commit).items():
        print(f"{key:<9} {value}", flush=True)
    config, kv_config = subject(options)
    spec = read_config(config)
    built, _ = build(config, mx.bfloat16)
    model = specialize(built, kernels=False)  # which would take a minute to compile and change no byte of the caches
    if not spec.sliding_window <= options.tokens or options.chunk % STEP:
        print(f"--tokens has to be {spec.sliding_window} or more, and --chunk a multiple of {STEP}")
        return 2
    print(f"\n{options.size}: {size_in_gb(model):.2f} GB of weights", flush=True)
    return memory(model, spec, kv_config, options.tokens, options.chunk, options.limit)


def memory(model: Any, spec: Spec, kv_config: Any, tokens: int, chunk: int, limit: float) -> int:
    """One line for each kind of caches. How many hold another number of bytes than the formula says, or failed."""
    print(f"   {tokens} tokens in chunks of {chunk}, then {DECODED} single ones; MB beside the weights")
    print(
        f"   {'':<10} {'caches':>9} {'formula':>9} {'active':>9} {'peak':>9} {'prompt':>10} {'a token':>11}", flush=True
    )
    wrong = 0
    for name, entries in (("(first)", kv_config), ("plain", None), ("kv_config", kv_config)):
        try:
            wrong += measure(name, model, spec, entries, 2 * chunk if name == "(first)" else tokens, chunk, limit)
        except Exception as error:  # the next may still tell something
            wrong += 1
            print(f"   {name:<10} {type(error).__name__}: {str(error)[:300]}", flush=True)
        gc.collect()
        mx.clear_cache()
    return wrong


def measure(name: str, model: Any, spec: Spec, entries: Any, tokens: int, chunk: int, limit: float) -> int:
    """One line. 1 if the caches hold another number of bytes than the formula says."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches = make_cache(model, entries)
    ids = mx.random.randint(0, spec.vocab_size, (1, tokens), key=mx.random.key(5))
    start = time.perf_counter()
    for at in range(0, tokens, chunk):
        model(ids[:, at : at + chunk], cache=caches)
        mx.eval([one.state for one in caches])
        mx.clear_cache()
        if time.perf_counter() - start > limit and at + chunk < tokens:
            tokens, name = at + chunk, f"{name}, {at + chunk} tokens"
            break
    prompt = time.perf_counter() - start
    peak = mx.get_peak_memory() - before
    taken = []
    for step in range(DECODED):
        start = time.perf_counter()
        logits = model(mx.array([[step + 3]]), cache=caches)
        mx.eval(logits)
        taken.append(time.perf_counter() - start)
    del logits
    mx.clear_cache()
    held = sum(one.nbytes for one in caches)
    stored = spec if entries is None else spec.with_kv(read_kv_config(entries, spec))
    expected = formula(stored, tokens + DECODED)
    figures = (held, expected, mx.get_active_memory() - before, peak)
    served, _ = model.dispatch.last
    print(
        f"   {name:<10} "
        + " ".join(f"{figure / 1e6:9.1f}" for figure in figures)
        + f" {prompt:8.2f} s {min(taken) * 1e3:7.2f} ms  {served}",
        flush=True,
    )
    return int(held != expected)


def formula(spec: Spec, tokens: int) -> int:
    total = 0
    for index in spec.owners:
        layer, kv = spec.layers[index], spec.kv_of(index)
        full = layer.attention is Attention.FULL
        rows = -(-tokens // STEP) * STEP if full else min(tokens, spec.sliding_window)
        row = layer.head_dim * 2 if kv is None else layer.head_dim * kv.bits // 8 + 4 * layer.head_dim // kv.group_size
        total += 2 * layer.kv_heads * rows * row
    return total


def subject(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, int]]]:
    if options.toy:
        sys.path.insert(0, str(ROOT / "tests"))
        from toys import SHAPES

        config = dict(SHAPES[options.size])
        return config, [{"layer_idx": i, "bits": 4, "group_size": 32} for i in read_config(config).owners]
    config, kv_config = (
        json.loads((ROOT / f"codegen/specs/gemma4_{options.size}_optiq.{kind}.json").read_text())
        for kind in ("config", "kv_config")
    )
    return config, kv_config


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", default="12b", choices=("12b", "26b", "e4b"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each prompt (default: 120)")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    parser.add_argument("--toy", action="store_true", help="a small model (needs the codegen extra)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
