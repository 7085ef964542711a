"""The kernels for the large quantized products: what each costs beside MLX's own, and what they do for whole models.

Products: every distinct one of a model, 4-bit as built and (12b) some of 8 bits; device time a call behind a kernel
that holds the device until all is queued, each call needing the last one's result, weights out of the device's cache;
host time a call. Models: random 4-bit weights at full size; decode with kernels for more and more of the products, 16
steps compared byte for byte with mlx-lm, then rounds that take turns. Tune (12b): other layouts of the same kernel.
Downloads nothing.

Expected: 26b, e4b and 12b 40 s each, nearly all of it compiling, and 30 s for tune; no part is begun after --budget.
On a machine where straightline is not installed:  . tests/gpu/path.sh && python3 tests/gpu/matvec.py
Parts: --sizes 12b --only models,products,tune;  all: products that do not pay, too (2.6 s of compiling each);
--toy runs the models at toy sizes on a CPU.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("STRAIGHTLINE_CACHE", tempfile.mkdtemp(prefix="straightline-matvec-"))

import mlx.core as mx
from machine import ROOT, describe
from ways import parts

from straightline.runtime import load_generated, specialize
from straightline.runtime.kernels import (
    GatedExperts,
    Geglu,
    PerLayerGate,
    QuantizedMatvec,
    QuantizedPerLayerGate,
    QuantizedRouter,
    Router,
    SummedExperts,
    report,
    resolve,
    resolve_all,
)
from straightline.runtime.kernels.backends import detect
from straightline.runtime.kernels.launch import launcher
from straightline.runtime.kernels.selfcheck import compare
from straightline.runtime.products import Product, find_products, pays, with_kernels
from straightline.runtime.verification.random_model import build

SIZES = ("e4b", "12b", "26b", "e2b", "31b")
CONTEXTS = {"e4b": 600, "e2b": 600}
SPIN_MS = 12
COLD = 160 << 20  # bytes of weights that take turns: more than the device's cache
SMALLEST = 1 << 20  # products under this are not even tried
STEPS, WARM_UP, TOKENS, ROUNDS = 16, 10, 30, 6
TRIED = {
    "gated": ((2, 4, 8), (2, 8, 8), (2, 8, 4), (4, 2, 8)),
    "unembed": ((2, 4, 8), (1, 8, 8), (2, 8, 8)),
    "down_proj": ((1, 8, 8), (2, 8, 4), (1, 16, 8)),
    "qkv_proj": ((1, 8, 8), (2, 4, 8)),
}
SPIN = """
unsigned long long start, now;
asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < NANOSECONDS);
for (int i = threadIdx.x; i < SIZE; i += 32) y[i] = x[i];
"""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    start = time.perf_counter()
    for name, value in describe(options.commit).items():
        print(f"{name:<9} {value}", flush=True)
    print(f"kernels   {detect()}", flush=True)
    late = lambda: time.perf_counter() - start > options.budget  # noqa: E731
    bad = 0
    for size in options.sizes:
        if late():
            print(f"\n== {size}: not reached within {options.budget} s", flush=True)
            continue
        bad += attempt(lambda size=size: check(size, options, late), size)
        gc.collect()
        mx.clear_cache()
        print(f"   {time.perf_counter() - start:.0f} s so far", flush=True)
    return 1 if bad else 0


def attempt(call: Callable[[], int | None], what: str) -> int:
    """What the call counts as bad; 1 if it raises. The next cell may still tell something."""
    try:
        return call() or 0
    except Exception:
        print(f"FAILED {what}: {traceback.format_exc()}", flush=True)
        return 1


def check(size: str, options: argparse.Namespace, late: Callable[[], bool]) -> int:
    config, file = subject(size, options)
    text = config.get("text_config", config)
    built, oracle = build(config, mx.bfloat16)
    start = time.perf_counter()
    model = specialize(built, file, strict=True, kernels=True)
    print(f"\n== {size}: specialize {time.perf_counter() - start:.1f} s; one token: {decoding(model)}", flush=True)
    for site, (state, reason) in report().items():
        if state == "plain":
            print(f"   plain: {site}: {reason}", flush=True)
    inner = model.get("language_model", model)
    every = "all" in options.only
    found = [one for one in find_products(file, inner) if pays(one) or (every and packed_bytes(one.site) >= SMALLEST)]
    bad = 0
    if "models" in options.only:
        context = 20 if options.toy else CONTEXTS.get(size, 1100)
        bad += attempt(lambda: models(model, oracle, found, text["vocab_size"], context, options), f"{size} models")
    if "products" in options.only and not late():
        bad += attempt(lambda: products(found, every), f"{size} products")
    if "tune" in options.only and size == "12b" and not late():
        bad += attempt(lambda: tune(found, late), f"{size} tune")
    return bad


def decoding(model: Any) -> str:
    return model.dispatch.decode_reason or "by decode"


# Products


HEAD = (
    f"   {'slot':<28} {'rows x inputs':>14} bits {'MB':>6} | {'device us: MLX':>14} {'kernel':>7} {'saved':>6} "
    f"| {'GB/s: MLX':>9} {'kernel':>6} | {'host us: MLX':>12} {'kernel':>6} {'more':>5} | pays now"
)


def products(found: list[Product], every: bool) -> int:
    if detect().name != "cuda":
        print("   products: no CUDA here", flush=True)
        return 0
    print(HEAD, flush=True)
    cells = list({one.site: one for one in found}.values())
    if every:
        cells += [one._replace(site=replace(one.site, bits=8)) for one in cells if one.layer in (None, 0)]
    return sum(attempt(lambda one=one: product(one), repr(one.site)) for one in cells)


def product(one: Product) -> int:
    site = one.site
    call = resolve(site)
    state, reason = report()[site]
    if state != "kernel":
        print(f"   {one.slot}: {site}: {state}: {reason}", flush=True)
        return 1
    d0, h0, d1, h1 = cost(site, {"MLX": own(site), "kernel": call})
    packed = packed_bytes(site)
    read = packed * (1 + 32 / (site.bits * site.group_size))
    outputs = packed * 8 // site.bits // site.inputs_size
    print(
        f"   {one.slot:<28} {f'{outputs} x {site.inputs_size}':>14} {site.bits:>4} {packed / 1e6:>6.1f} "
        f"| {d0:>14.1f} {d1:>7.1f} {d0 - d1:>6.1f} | {read / d0 / 1e3:>9.0f} {read / d1 / 1e3:>6.0f} "
        f"| {h0:>12.1f} {h1:>6.1f} {h1 - h0:>5.1f} | {'yes' if pays(one) else 'no'}",
        flush=True,
    )
    return 0


def own(site: Any) -> Callable[..., mx.array]:
    """What runs where the kernel does not: MLX's products, then the kernel for geglu."""
    settings = {"transpose": True, "group_size": site.group_size, "bits": site.bits}
    if isinstance(site, SummedExperts):
        turns = mx.arange(site.top_k, dtype=mx.uint32).reshape(1, 1, site.top_k)

        def summed(x: mx.array, chosen: mx.array, gates: mx.array, *w: mx.array) -> mx.array:
            y = mx.gather_qmm(x, *w, lhs_indices=turns, rhs_indices=chosen, **settings)
            return (mx.expand_dims(gates, -1) * y.squeeze(-2)).sum(-2)

        return summed
    if isinstance(site, GatedExperts):
        both = resolve(Geglu(site.width, joined=False, experts=site.top_k))
        rows = mx.zeros((1, 1, site.top_k), dtype=mx.uint32)

        def experts(x: mx.array, chosen: mx.array, *weights: mx.array) -> mx.array:
            x, halves = x.reshape(1, 1, 1, 1, -1), (weights[:3], weights[3:])
            gate, up = (mx.gather_qmm(x, *w, lhs_indices=rows, rhs_indices=chosen, **settings) for w in halves)
            return both(gate, up)

        return experts
    if isinstance(site, QuantizedRouter):
        router = resolve(Router(site.experts, site.top_k))
        return lambda x, w, s, b, e: router(mx.quantized_matmul(x, w, scales=s, biases=b, **settings), e)
    if isinstance(site, QuantizedPerLayerGate):
        gate = resolve(PerLayerGate(site.size, site.layers))
        return lambda x, w, s, b, u, _: gate(mx.quantized_matmul(x, w, scales=s, biases=b, **settings), u, 0)
    geglu = resolve(Geglu(site.width)) if site.glu else lambda y: y
    return lambda x, w, s, b: geglu(mx.quantized_matmul(x, w, scales=s, biases=b, **settings))


def packed_bytes(site: Any) -> int:
    """Of the weights that a token reads, without their scales and biases."""
    if isinstance(site, QuantizedMatvec):
        return site.packed_bytes
    if isinstance(site, QuantizedRouter):
        return site.experts * site.inputs_size * site.bits // 8
    if isinstance(site, QuantizedPerLayerGate):
        return site.size * site.inputs_size * site.bits // 8
    rows = site.top_k * site.width * (1 if isinstance(site, SummedExperts) else 2)
    return rows * site.inputs_size * site.bits // 8


def cost(site: Any, sides: dict[str, Callable[..., mx.array]], rounds: int = 5) -> list[float]:
    """Microseconds of the device and of the host a call, for each side."""
    x, *weights = site.inputs(0)
    packed = [number for number, array in enumerate(weights) if array.dtype == mx.uint32 and array.size > 64]
    size = sum(weights[number].nbytes for number in packed)
    copies = [
        [w ^ mx.array(7919 * turn, dtype=mx.uint32) if number in packed else w for number, w in enumerate(weights)]
        for turn in range(max(1, min(64, -(-COLD // size))))
    ]
    mx.eval(x, copies)
    count = max(20, min(100, int(2e9 // size)))
    spin = spinner(x.shape)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(1 + rounds):
        host, device = chain(lambda x, *_: x, x, copies, count, spin)
        for name, side in sides.items():
            found = chain(side, x, copies, count, spin)
            samples[name].append((found[1] - device, found[0] - host))
    return [
        1e6 * statistics.median(column) / count for rows in samples.values() for column in zip(*rows[1:], strict=True)
    ]


def tune(found: list[Product], late: Callable[[], bool]) -> int:
    """Other numbers of rows a warp, steps unrolled and warps a block: exact all the same, and how fast."""
    backend = detect()
    for slot, tried in TRIED.items():
        site = next((one.site for one in found if one.slot == slot), None)
        for rows, unrolled, warps in tried if site is not None and backend.name == "cuda" else ():
            if late():
                print("   tune: no time left", flush=True)
                return 0
            program = site.program("cuda")
            finished = rows // 2 if site.glu else rows
            changed = {"ROWS": rows, "UNROLLED": unrolled, "BLOCK": 32 * warps}
            constants = tuple((name, changed.get(name, value)) for name, value in program.constants)
            blocks = -(-site.width // (warps * finished))
            program = replace(program, constants=constants, threads=32 * warps, blocks=blocks)
            call = launcher(site, program, backend.make(program), mx.bfloat16, several=False)
            differs = compare(site, call, mx.bfloat16, 1).differs
            device, _ = cost(site, {"kernel": call}, 3)
            now = " (as it is)" if program == site.program("cuda") else ""
            speed = packed_bytes(site) * (1 + 32 / (site.bits * site.group_size)) / device / 1e3
            print(
                f"   tune {slot:<10} {rows} rows, {unrolled} steps, {warps} warps: {device:7.1f} us, "
                f"{speed:5.0f} GB/s{now} {differs}",
                flush=True,
            )
    return 0


def spinner(shape: tuple[int, ...]) -> Callable[[mx.array], mx.array]:
    """A kernel that holds one warp of the device for SPIN_MS, and passes its input on."""
    size = shape[-1]
    source = SPIN.replace("NANOSECONDS", f"{SPIN_MS}000000ull").replace("SIZE", str(size))
    kernel = mx.fast.cuda_kernel(name=f"spin_{size}", input_names=["x"], output_names=["y"], source=source)
    launch = {"output_shapes": [shape], "output_dtypes": [mx.bfloat16], "grid": (32, 1, 1)}
    return lambda x: kernel(inputs=[x], threadgroup=(32, 1, 1), **launch)[0]


def chain(
    call: Callable[..., mx.array],
    x: mx.array,
    weights: list[tuple[mx.array, ...]],
    count: int,
    spin: Callable[[mx.array], mx.array],
) -> tuple[float, float]:
    """Seconds of the host, and from dispatch until the device is done. Each call reads the last one's result."""
    mx.synchronize()
    begin = time.perf_counter()
    y = spin(x)
    for number in range(count):
        # Of two results the second is of x's dtype.
        y = y if isinstance(y, mx.array) else y[-1]
        y = call(mx.minimum(x, y.reshape(-1)[:1]), *weights[number % len(weights)])
    built = time.perf_counter()
    mx.async_eval(y)
    dispatched = time.perf_counter()
    mx.synchronize()
    return dispatched - begin, time.perf_counter() - built


# Models


def models(
    model: Any, oracle: Any, found: list[Product], vocabulary: int, context: int, options: argparse.Namespace
) -> int:
    calls = resolve_all([one.site for one in found])
    states = report()
    on = [one for one in found if states[one.site][0] == "kernel"]
    print(f"   {len(on)} of {len(found)} products have a kernel", flush=True)
    bound = model._bound
    heads = ("unembed", "lm_head")
    wanted: dict[str, Callable[[Product], bool]] = {
        "no matvec": lambda one: False,
        "saving launches": lambda one: not isinstance(one.site, QuantizedMatvec) or one.site.glu,
        "and the head": lambda one: one.slot in heads or not isinstance(one.site, QuantizedMatvec) or one.site.glu,
        "as chosen": pays,
        **({"all": lambda one: True} if "all" in options.only else {}),
    }
    weights = {}
    for name, want in wanted.items():
        pairs = [(one, call) for one, call in zip(found, calls, strict=True) if want(one)]
        weights[name] = with_kernels(bound.weights, [one for one, _ in pairs], [call for _, call in pairs])
    prompt = mx.array([[(7919 * index) % vocabulary for index in range(context)]])
    names = ("mlx-lm", *wanted)
    caches = {name: oracle.make_cache() if name == "mlx-lm" else model.make_cache() for name in names}
    token = mx.argmax(oracle(prompt, cache=caches["mlx-lm"])[:, -1, :], axis=-1)[:, None]
    for name in wanted:
        mx.eval(model(prompt, cache=caches[name]))

    def side(name: str) -> Callable[[mx.array], mx.array]:
        def step(ids: mx.array) -> mx.array:
            return oracle(ids, cache=caches[name]) if name == "mlx-lm" else model(ids, cache=caches[name])

        return step

    def use(name: str) -> Callable[[mx.array], mx.array]:
        if name in weights:
            bound.weights.single = weights[name]
        return side(name)

    departs = dict.fromkeys(names, "")
    for step in range(STEPS):
        logits = {name: use(name)(token) for name in names}
        mx.eval(list(logits.values()))
        for name, one in logits.items():
            if not departs[name] and not same(one, logits["mlx-lm"]):
                departs[name] = f"DEPARTS at step {step}"
        token = mx.argmax(logits["mlx-lm"][:, -1, :], axis=-1)[:, None]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        rate(use(name), token, WARM_UP)
    for _ in range(options.rounds):
        for name in names:
            rates[name].append(rate(use(name), token, options.tokens))
    for name in names:
        ratios = [one / other for one, other in zip(rates[name], rates["mlx-lm"], strict=True)]
        print(
            f"   {name:<18} x{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}], "
            f"best over best x{max(rates[name]) / max(rates['mlx-lm']):.2f}; "
            f"tok/s {statistics.median(rates[name]):.1f}, best {max(rates[name]):.1f}; "
            f"ms: {told(parts(use(name), token))}; "
            f"{departs[name] or f'equal at {STEPS} steps'}",
            flush=True,
        )
    print(f"   calls: {model.dispatch.counts}; peak {mx.get_peak_memory() / 1e9:.1f} GB", flush=True)
    return sum(map(bool, departs.values()))


def rate(step: Callable[[mx.array], mx.array], token: mx.array, tokens: int) -> float:
    """Tokens per second of a loop that, like mlx-lm's, asks for the next token before it reads the last."""
    mx.eval(token)
    token = mx.argmax(step(token)[:, -1, :], axis=-1)[:, None]
    mx.async_eval(token)
    started = time.perf_counter()
    for _ in range(tokens):
        following = mx.argmax(step(token)[:, -1, :], axis=-1)[:, None]
        mx.async_eval(following)
        token.item()
        token = following
    return tokens / (time.perf_counter() - started)


def told(parts: tuple[float, ...]) -> str:
    build, dispatch, wait = parts
    return f"build {build:.2f}, dispatch {dispatch:.2f}, wait {wait:.2f}"


def same(found: mx.array, expected: mx.array) -> bool:
    unsigned = {2: mx.uint16, 4: mx.uint32}[expected.dtype.size]
    return found.dtype == expected.dtype and bool(mx.array_equal(found.view(unsigned), expected.view(unsigned)).item())


# What is measured


def subject(size: str, options: argparse.Namespace) -> tuple[dict[str, Any], ModuleType]:
    config = json.loads((ROOT / f"codegen/specs/gemma4_{size}.config.json").read_text())
    if not options.toy:
        return config, importlib.import_module(f"straightline.generated.gemma4_{size}")
    from straightline.codegen import generate
    from straightline.runtime.verification.smaller import reduced

    config = reduced(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"toy_{size}.py")
        path.write_text(generate(config, f"toy-{size}"))
        return config, load_generated(path)


def parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default="26b,e4b,12b", help="which, in order (default: %(default)s)")
    parser.add_argument(
        "--only", default="models,products,tune", help="of models,products,tune,all (default: %(default)s)"
    )
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which no size is begun")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each side (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a round (default: %(default)s)")
    parser.add_argument("--toy", action="store_true", help="toy sizes, rendered first: a smoke test without a GPU")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    options = parser.parse_args(None if arguments is None else list(arguments))
    options.sizes = options.sizes.split(",")
    for size in options.sizes:
        if size not in SIZES:
            parser.error(f"--sizes has {size!r}; expected some of {','.join(SIZES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
