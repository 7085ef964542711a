"""The fast tier's attention on a GPU: its error next to MLX's own, its time, and whole models decoding with it.

Random inputs and weights; downloads nothing. Expected time on one H200: 75 s (`--budget`: what is not reached by then
is said). Parts: errors, cuts (threads and heads of a block), models; leave some out with --skip. Exits with 1 if a
kernel fails or is outside its bound.

    . tests/gpu/path.sh && python3 tests/gpu/fast_attention.py
"""

import argparse
import gc
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("STRAIGHTLINE_CACHE", tempfile.mkdtemp(prefix="straightline-fast-"))

import mlx.core as mx
import numpy as np
from machine import ROOT, describe

from straightline.runtime import make_cache, specialize
from straightline.runtime.commands.subject import published, published_kv_config
from straightline.runtime.kernels import Attention, FastAttention
from straightline.runtime.kernels.ahead import lay
from straightline.runtime.kernels.backends import detect
from straightline.runtime.kernels.fast import LENGTHS, Cut
from straightline.runtime.kernels.fast_check import BOUND, distance, reference
from straightline.runtime.kernels.fast_launch import clustered, parted
from straightline.runtime.kernels.resolve import first_lines
from straightline.runtime.verification.random_model import build
from straightline.runtime.verification.smaller import reduced

Call = Callable[..., Any]
SIZES = ("e4b", "12b", "26b", "e2b", "31b")
# Cuts to try beside a site's own, and the rows of the buffers at which they are timed.
CUTS: dict[tuple[int, int, int], tuple[Cut, ...]] = {
    (8, 2, 256): (
        *(Cut(4, 256, 4), Cut(2, 256, 4), Cut(1, 256, 4), Cut(1, 256, 8), Cut(1, 512, 4)),
        *(Cut(2, 256, 4, ahead=True), Cut(1, 256, 4, ahead=True)),
    ),
    (16, 8, 256): (Cut(2, 256, 4), Cut(1, 256, 4), Cut(1, 512, 4), Cut(2, 512, 4), Cut(1, 256, 4, ahead=True)),
    (8, 2, 512): (
        *(Cut(4, 256, 2), Cut(2, 256, 4), Cut(1, 256, 4), Cut(1, 512, 4)),
        *(Cut(4, 256, 2, ahead=True), Cut(2, 256, 2, ahead=True), Cut(1, 256, 4, ahead=True)),
    ),
    (16, 1, 512): (
        *(Cut(4, 256, 2), Cut(2, 256, 4), Cut(1, 256, 4), Cut(1, 512, 4)),
        *(Cut(4, 256, 2, ahead=True), Cut(2, 256, 2, ahead=True)),
    ),
}
PARTS = (32, 64, 128, 256)
failures: list[str] = []


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for key, value in describe(options.commit).items():
        print(f"{key:<9} {value}", flush=True)
    backend = detect()
    if backend.name != "cuda":
        print(f"no fast attention here: {backend.reason or backend.name}; errors are MLX's own operations'", flush=True)
    start = time.perf_counter()
    profiler = Profiler(not options.no_profiler)
    parts: dict[str, Callable[[], None]] = {
        "cuts": lambda: cuts(options, backend, profiler, start),
        "models": lambda: models(options, start),
        "errors": lambda: errors(options, backend, profiler, start),
    }
    for name, part in parts.items():
        if name in options.skip:
            continue
        began = time.perf_counter()
        print(f"\n== {name}", flush=True)
        try:
            part()
        except Exception:
            failures.append(name)
            traceback.print_exc()
        print(f"   ({time.perf_counter() - began:.1f} s)", flush=True)
        gc.collect()
        mx.clear_cache()
    for failure in failures:
        print(f"FAILED: {failure}", flush=True)
    print(f"{len(failures)} failures, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failures else 0


def late(options: argparse.Namespace, start: float, what: str) -> bool:
    if time.perf_counter() - start < options.budget:
        return False
    print(f"   not reached within {options.budget} s: {what}", flush=True)
    return True


# Errors and times of the chosen cut


def errors(options: argparse.Namespace, backend: Any, profiler: "Profiler", start: float) -> None:
    prepare(
        [one for _, site, _ in sites(options) for one in ((site, site.cut, False), (site, site.long_cut, True))],
        backend,
    )
    seen: set[FastAttention] = set()
    for size, site, rows in sites(options):
        if site in seen or late(options, start, f"{size} {site}"):
            continue
        seen.add(site)
        try:
            forms, compiled = made(site, site.cut, backend, long=site.long_cut)
            print(f"   {size:<4} {named(site)} {site.cut} {site.long_cut}  first calls {compiled}", flush=True)
            if forms:
                report_errors(site, forms, options)
                report_times(site, forms, rows, profiler)
        except Exception as error:
            failed(f"{size} {named(site)}", error)
        mx.clear_cache()


def sites(options: argparse.Namespace) -> Iterator[tuple[str, FastAttention, tuple[int, ...]]]:
    """Plain K/V of all sizes; then quantized, and whole buffers."""
    shapes = [(size, *shape) for size in options.sizes for shape in shapes_of(size)]
    for size, kind, (heads, kv_heads, head_dim), window in shapes:
        lengths = (window,) if kind == "sliding" else ((1100, 4096, 32768) if size in ("e4b", "12b") else ())
        yield size, FastAttention(heads, kv_heads, head_dim), lengths
    for bits in (4, 8):
        for size, kind, shape, window in shapes:
            if size in ("e4b", "12b"):
                yield size, FastAttention(*shape, bits, 64), (window if kind == "sliding" else 32768,)
    for size, kind, shape, _ in shapes:
        if size == "e4b" and kind == "sliding":
            yield size, FastAttention(*shape, whole=True), (512,)


def shapes_of(size: str) -> list[tuple[str, tuple[int, int, int], int]]:
    config = json.loads((ROOT / f"codegen/specs/gemma4_{size}.config.json").read_text())
    text = config.get("text_config", config)
    heads, window = text["num_attention_heads"], text["sliding_window"]
    kv = text["num_key_value_heads"]
    return [
        ("sliding", (heads, kv, text["head_dim"]), window),
        ("full", (heads, text.get("num_global_key_value_heads") or kv, text["global_head_dim"]), window),
    ]


def made(
    site: FastAttention, cut: Cut, backend: Any, parts: int | None = None, two: bool = True, long: Cut | None = None
) -> tuple[dict[str, Call], str]:
    """One form or both (`long`: the cut of two launches, if another). Empty where there is no CUDA."""
    if backend.name != "cuda":
        return {}, "-"
    one = site.in_cluster("cuda", cut)
    forms = {"one launch": clustered(site, one, backend.make(one))}
    if two:
        some = site.in_parts("cuda", long or cut)
        forms["two launches"] = parted(site, some, [backend.make(program) for program in some], parts)
    if two and site.head_dim == 512 and not site.bits:
        some = site.in_tensors("cuda")
        forms["tensors"] = parted(site, some, [backend.make(program) for program in some], parts)
    inputs, seconds = site.inputs_of(300, 0), []
    mx.eval(inputs)
    for name in list(forms):
        begin = time.perf_counter()
        try:
            mx.eval(forms[name](*inputs))
        except Exception as error:
            failed(f"{named(site)} {cut} {name}", error)
            del forms[name]
        seconds.append(f"{time.perf_counter() - begin:.1f} s")
    return forms, " + ".join(seconds)


def prepare(wanted: list[tuple[FastAttention, Cut, bool]], backend: Any) -> None:
    """Kernels compiled ahead, many at a time: (site, cut, whether in two launches)."""
    if backend.name != "cuda":
        return
    begin, programs = time.perf_counter(), {}
    for site, cut, two in dict.fromkeys(wanted):
        q, k, v, *rows = site.inputs_of(1, 0)
        inputs = (q, *k, *v, *rows) if site.bits else (q, k, v, *rows)
        left = (mx.zeros((1, 1, 1)), mx.zeros((1, 1, 2)))
        if two and site.head_dim == 512 and not site.bits:
            reading, _ = site.in_tensors("cuda")
            programs[reading.name] = (reading, inputs, (mx.float32, mx.float32))
        if two:
            reading, adding = site.in_parts("cuda", cut)
            programs[reading.name] = (reading, inputs, (mx.float32, mx.float32))
            programs[adding.name] = (adding, left, (mx.bfloat16,))
        else:
            one = site.in_cluster("cuda", cut)
            programs[one.name] = (one, inputs, (mx.bfloat16,))
    with ThreadPoolExecutor(12) as pool:
        laid = list(pool.map(lambda one: lay(*one, backend), programs.values()))
    reasons = {one.reason for one in laid if one.reason}
    told = f"; left to MLX: {'; '.join(sorted(reasons))}" if reasons else ""
    print(f"   {len(laid)} kernels compiled ahead in {time.perf_counter() - begin:.1f} s{told}", flush=True)


def report_errors(site: FastAttention, forms: dict[str, Call], options: argparse.Namespace) -> None:
    """Against numpy's float64 up to 3000 rows of plain K/V, against the self-check's float32 otherwise."""
    lengths = [length for length in LENGTHS if length <= options.longest]
    calls = forms | mlx_forms(site)
    found: dict[str, list[float]] = {name: [] for name in (*calls, "float32")}
    for seed, length in enumerate(lengths):
        inputs, truth = drawn(site, length, seed) if length <= 3000 and not site.bits else (None, None)
        inputs = site.inputs_of(length, seed) if inputs is None else inputs
        near = reference(site, *inputs)
        truth = near if truth is None else truth
        found["float32"].append(distance(near, truth).item())
        for name, call in calls.items():
            y = call(*inputs)
            found[name].append(distance(y, truth).item())
            if name in forms and not mx.array_equal(y.view(mx.uint16), call(*inputs).view(mx.uint16)).item():
                failures.append(f"{named(site)} {name}: two calls over {length} rows differ")
    for name, values in found.items():
        print(f"        error {name:<13}" + " ".join(f"{one:.1e}" for one in values), flush=True)
    for name in forms:
        others = found.get("MLX", [math.inf] * len(lengths))
        for length, one, other in zip(lengths, found[name], others, strict=True):
            if not one <= BOUND or one > other * 1.001 + 1e-6:
                failures.append(f"{named(site)} {name}: error {one:.1e} over {length} rows, MLX {other:.1e}")


def drawn(site: FastAttention, length: int, seed: int) -> tuple[tuple[Any, ...], mx.array]:
    """Inputs drawn by numpy, and the true result in its float64: nothing comes from the device on the way."""
    draw = np.random.default_rng(seed)
    room = length + 256 * (seed % 2) + 8 * site.whole
    q = bfloat16(draw.standard_normal((site.heads, site.head_dim)) * (0.2 if seed % 2 else 1.0))
    k, v = (bfloat16(draw.standard_normal((site.kv_heads, room, site.head_dim), np.float32)) for _ in range(2))
    results = []
    for head in range(site.heads):
        keys, values = (wide(one[head // site.repeats, :length]) for one in (k, v))
        scores = keys @ wide(q[head])
        weights = np.exp(scores - scores.max())
        results.append(weights @ values / weights.sum())
    buffers = [mx.array(one[None]).view(mx.bfloat16) for one in (k, v)]
    seen = buffers if site.whole else [one[..., :length, :] for one in buffers]
    rows = (mx.array(length, dtype=mx.int32),) if site.whole else ()
    inputs = (mx.array(q[None, :, None]).view(mx.bfloat16), *seen, *rows)
    return inputs, mx.array(np.concatenate(results).astype(np.float32))


def bfloat16(values: Any) -> Any:
    """Rounded to bfloat16, as uint16."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def mlx_forms(site: FastAttention) -> dict[str, Call]:
    """MLX's own operations, if it has kernels for them here."""
    try:
        mx.eval(site.plain(*site.inputs_of(300, 1)))
    except RuntimeError as error:
        print(f"        MLX itself cannot: {first_lines(error)}", flush=True)
        return {}
    return {"MLX": site.plain}


def report_times(site: FastAttention, forms: dict[str, Call], rows: tuple[int, ...], profiler: "Profiler") -> None:
    """Microseconds a call: of a chain in which each call reads what the one before wrote; and kernels alone."""
    exact = None if site.bits or site.whole else Attention(site.heads, site.kv_heads, site.head_dim).form("cuda")
    calls = forms | mlx_forms(site) | ({"written out": exact} if exact else {})
    jobs = {(length, name): Job(site, call, length) for length in rows for name, call in calls.items()}
    walls = {key: [job() for _ in range(4)][1:] for key, job in jobs.items()}
    kernels = profiler.times(list(jobs.values()))
    for length in rows:
        told = [
            f"{name} {1e6 * statistics.median(walls[key]):.1f} ({kernels.get(job, '-')})"
            for key, job in jobs.items()
            for where, name in [key]
            if where == length
        ]
        print(f"        {length:>6} rows, us chained (kernels alone): {', '.join(told)}", flush=True)


class Job:
    """A chain of calls; returns seconds a call."""

    count = 40

    def __init__(self, site: FastAttention, call: Call, length: int) -> None:
        self.call, self.inputs, self.shape = call, site.inputs_of(length, 1), (1, site.heads, 1, site.head_dim)
        mx.eval(self.inputs)

    def __call__(self) -> float:
        return chain(self.call, self.inputs, self.shape, self.count)


def chain(call: Call, inputs: tuple[Any, ...], shape: tuple[int, ...], count: int) -> float:
    q, *rest = inputs
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        q = call(q, *rest).reshape(shape)
    mx.eval(q)
    return (time.perf_counter() - start) / count


class Profiler:
    """Sums of kernel times by torch's profiler, where torch is there. It sees MLX's kernels, too."""

    pause = 0.01

    def __init__(self, wanted: bool) -> None:
        self.profile: Any = None
        if not wanted:
            return
        try:
            import torch
            from torch.profiler import ProfilerActivity, profile

            torch.zeros(1).cuda()
            self.profile = lambda: profile(activities=[ProfilerActivity.CUDA])
        except Exception as error:
            print(f"no profiler: {type(error).__name__}: {first_lines(error)}", flush=True)

    def times(self, jobs: list[Job]) -> dict[Job, str]:
        """GPU microseconds of one call, and how many kernels it takes. One session; pauses tell the jobs apart."""
        if self.profile is None:
            return {}
        try:
            with self.profile() as record:
                for job in jobs:
                    job()
                    mx.synchronize()
                    time.sleep(2 * self.pause)
            events = [one for one in record.events() if str(one.device_type).endswith("CUDA")]
            events = [one for one in events if not re.search("memcpy|memset", one.name, re.IGNORECASE)]
            events.sort(key=lambda one: one.time_range.start)
            groups: list[list[Any]] = []
            end = -1e18
            for event in events:
                if event.time_range.start - end > 1e6 * self.pause:
                    groups.append([])
                groups[-1].append(event)
                end = event.time_range.end
            if len(groups) != len(jobs):
                print(f"        profiler: {len(groups)} groups of kernels for {len(jobs)} jobs", flush=True)
                return {}
            return {
                job: f"{sum(one.time_range.end - one.time_range.start for one in group) / job.count:.1f} in "
                f"{len(group) / job.count:.1f}"
                for job, group in zip(jobs, groups, strict=True)
            }
        except Exception as error:
            print(f"        profiler: {type(error).__name__}: {first_lines(error)}", flush=True)
            self.profile = None
            return {}


# Other cuts


def cuts(options: argparse.Namespace, backend: Any, profiler: Profiler, start: float) -> None:
    wanted = [
        (FastAttention(*shape), cut, two) for shape, some in CUTS.items() for cut in some for two in (False, True)
    ]
    prepare([(site, cut, two) for site, cut, two in wanted if site.head_dim == 512 or not two], backend)
    limit = start + options.cuts_budget
    for shape, others in CUTS.items():
        site = FastAttention(*shape)
        lengths = (512, 1024) if site.head_dim == 256 else (1100, 2304, 4096, 32768)
        for cut in others:
            if time.perf_counter() > limit:
                print(f"   not reached within {options.cuts_budget} s: {named(site)} {cut}", flush=True)
                continue
            forms, compiled = made(site, cut, backend, two=site.head_dim == 512)
            jobs = {f"{name} {length}": Job(site, call, length) for name, call in forms.items() for length in lengths}
            if cut != others[0]:
                jobs = {name: job for name, job in jobs.items() if not name.startswith("tensors")}
            elif forms and max(lengths) > 4096:
                for parts in PARTS:
                    for name, call in made(site, cut, backend, parts)[0].items():
                        if name != "one launch":
                            jobs[f"{name} in {parts} {max(lengths)}"] = Job(site, call, max(lengths))
            walls = {name: statistics.median([job() for _ in range(4)][1:]) for name, job in jobs.items()}
            kernels = profiler.times(list(jobs.values()))
            told = [f"{name}: {1e6 * walls[name]:.1f} ({kernels.get(job, '-')})" for name, job in jobs.items()]
            print(f"   {named(site)} {cut} first calls {compiled}: {'; '.join(told)}", flush=True)
        mx.clear_cache()


# Whole models


def models(options: argparse.Namespace, start: float) -> None:
    for size in options.models:
        if late(options, start, f"model {size}"):
            return
        try:
            model_of(size, options)
        except Exception as error:
            failed(f"model {size}", error)
        gc.collect()
        mx.clear_cache()


def model_of(size: str, options: argparse.Namespace) -> None:
    config = json.loads((ROOT / f"codegen/specs/gemma4_{size}.config.json").read_text())
    if options.reduced:
        config = reduced(config)
    begin = time.perf_counter()
    built, _ = build(config, mx.bfloat16)
    seconds = [time.perf_counter() - begin]
    tiers = {}
    for tier in ("exact", "fast"):
        begin = time.perf_counter()
        tiers[tier] = specialize(built, strict=True, kernels=options.kernels, tier=tier, generate=options.reduced)
        seconds.append(time.perf_counter() - begin)
    fast = tiers["fast"]
    told = fast.dispatch
    print(
        f"   {size}: built {seconds[0]:.1f} s, specialized exact {seconds[1]:.1f} s, fast {seconds[2]:.1f} s; "
        f"one token: {told.decode_reason or 'by decode'}; kernels: {told.kernels_reason or 'on'}; in place: "
        f"{told.in_place_reason or 'yes'}; whole buffers: {fast._bound.routes[0].whole}",
        flush=True,
    )
    for name, (state, reason) in tiers["fast"].dispatch.tier_sites.items():
        print(f"        {name}: {state}: {reason}", flush=True)
        if state != "fast" and detect().name == "cuda":
            failures.append(f"model {size}: {name} is {state}: {reason}")
    vocabulary = config.get("text_config", config)["vocab_size"]
    race(tiers, "plain K/V", lambda model: model.make_cache(), vocabulary, options)
    found = published_kv_config(published(f"gemma4-{size}").spec)
    if found is not None and not options.reduced:  # whose file bakes no K/V bits
        race(tiers, f"K/V of {found[0]}", lambda model: make_cache(model, found[1]), vocabulary, options)


def race(tiers: dict[str, Any], what: str, make: Call, vocabulary: int, options: argparse.Namespace) -> None:
    prompt = mx.array([[(7919 * index) % vocabulary for index in range(options.context)]])
    caches = {}
    for tier, model in tiers.items():
        caches[tier] = make(model)
        mx.eval(model(prompt, cache=caches[tier]))
    agree(tiers, caches, options.steps)
    rates: dict[str, list[float]] = {tier: [] for tier in tiers}
    token = mx.array([[23]])
    for turn in range(options.rounds + 1):
        for tier, model in tiers.items():
            rate = tokens_per_second(model, caches[tier], token, options.tokens)
            if turn:
                rates[tier].append(rate)
    ratio = statistics.median(fast / exact for exact, fast in zip(rates["exact"], rates["fast"], strict=True))
    best = max(rates["fast"]) / max(rates["exact"])
    told = ", ".join(f"{tier} {statistics.median(one):.1f} (best {max(one):.1f})" for tier, one in rates.items())
    served = {tier: model.dispatch.counts for tier, model in tiers.items()}
    print(
        f"        {what}, {options.context} tokens: tok/s {told}; fast over exact x{ratio:.2f}, best x{best:.2f}; "
        f"calls {served}",
        flush=True,
    )


def agree(tiers: dict[str, Any], caches: dict[str, Any], steps: int) -> None:
    """Both tiers decode the tokens that the exact one chooses."""
    token, same, apart = mx.array([[23]]), 0, []
    for _ in range(steps):
        logits = {tier: model(token, cache=caches[tier])[0, -1].astype(mx.float32) for tier, model in tiers.items()}
        chosen = {tier: mx.argmax(one) for tier, one in logits.items()}
        same += int(chosen["exact"].item() == chosen["fast"].item())
        logs = {tier: one - mx.logsumexp(one) for tier, one in logits.items()}
        apart.append((mx.exp(logs["exact"]) * (logs["exact"] - logs["fast"])).sum().item())
        token = chosen["exact"].reshape(1, 1)
    print(
        f"        argmax agrees at {same} of {steps} steps; KL exact to fast mean {statistics.mean(apart):.2e}, "
        f"most {max(apart):.2e} (random weights: a difference in one bit anywhere grows to this)",
        flush=True,
    )


def tokens_per_second(model: Any, cache: Any, token: mx.array, count: int) -> float:
    mx.async_eval(token)
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        following = mx.argmax(model(token, cache=cache)[:, -1, :], axis=-1)[:, None]
        mx.async_eval(following)
        token.item()
        token = following
    token.item()
    return count / (time.perf_counter() - start)


def named(site: FastAttention) -> str:
    kv = f" {site.bits}-bit/{site.group_size}" if site.bits else ""
    return f"{site.heads}/{site.kv_heads} x {site.head_dim}{kv}{' whole' if site.whole else ''}"


def failed(what: str, error: Exception) -> None:
    text = f"{what}: {type(error).__name__}: {first_lines(error, 6)}"
    failures.append(text)
    print(f"   {text}", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="shapes of these (default: %(default)s)")
    parser.add_argument("--models", default="e4b,12b", help="which to build whole; none: '' (default: %(default)s)")
    parser.add_argument("--skip", default="", help="parts to leave out: errors, cuts, models")
    parser.add_argument("--budget", type=float, default=75, help="seconds (default: %(default)s)")
    parser.add_argument("--cuts-budget", type=float, default=25, help="seconds of them for cuts (default: %(default)s)")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, help="as specialize's (default: on CUDA)")
    parser.add_argument("--no-profiler", action="store_true", help="leave torch's profiler alone")
    parser.add_argument("--context", type=int, default=600, help="tokens before decoding (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="compared (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24, help="of a round")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="most rows of a cache (default: %(default)s)")
    parser.add_argument("--reduced", action="store_true", help="models of toy widths (needs the codegen extra)")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    options = parser.parse_args(arguments)
    for name in ("sizes", "models", "skip"):
        setattr(options, name, [one for one in getattr(options, name).split(",") if one])
    return options


if __name__ == "__main__":
    sys.exit(main())
