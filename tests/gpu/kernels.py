"""Every fused site of the five Gemma 4 sizes on a GPU: is its kernel bit-equal to its plain form, the plain form to
mlx-lm's own modules, what does a call cost the host, and how long does it compile?

Random weights and inputs; downloads nothing. Exits with 1 if anything differs or fails. On a machine where straightline
is not installed:  . tests/gpu/path.sh && python3 tests/gpu/kernels.py --json record.json
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("STRAIGHTLINE_CACHE", tempfile.mkdtemp(prefix="straightline-kernels-"))

import mlx.core as mx
from oracle import oracle

from straightline.runtime.kernels import (
    AttentionScores,
    DualResidualNorms,
    GatedExperts,
    Geglu,
    PerLayerEnd,
    PerLayerGate,
    ProductHeads,
    QKVRope,
    QKVRopeInto,
    QuantizedMatvec,
    QuantizedPerLayerGate,
    QuantizedRouter,
    ResidualNorms,
    Router,
    Site,
    SummedExperts,
    report,
    resolve_all,
)
from straightline.runtime.kernels.backends import Backend, detect
from straightline.runtime.kernels.launch import launcher
from straightline.runtime.kernels.resolve import first_lines, forget
from straightline.runtime.kernels.selfcheck import different

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("e4b", "12b", "26b", "e2b", "31b")
ROWS = 3


@dataclass
class Result:
    """Counts of values; host microseconds a call: building, dispatching; wall: until the device is done."""

    size: str
    site: str
    compile_s: float = 0.0
    values: int = 0
    kernel_differs: int = 0
    rows_values: int = 0
    rows_differ: int = 0
    plain_values: int = 0
    plain_differs: int = 0
    microseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: str = ""

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        wrong = {"kernel": self.kernel_differs, f"{ROWS} rows": self.rows_differ, "plain": self.plain_differs}
        return "; ".join(f"{name} DIFFERS {count}" for name, count in wrong.items() if count) or "equal"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    start = time.perf_counter()
    machine = describe(options.commit)
    for name, value in machine.items():
        print(f"{name:<9} {value}", flush=True)
    backend = detect()
    if not backend.name:
        print(f"no kernels here: {backend.reason}; plain forms are compared with mlx-lm's modules only", flush=True)
    print(HEAD, flush=True)
    results = []
    sites = list(chosen(options))
    for number, (size, site) in enumerate(sites, 1):
        late = time.perf_counter() - start > options.budget
        result = Result(size, repr(site))
        if late:
            result.failed = f"not reached within {options.budget} s"
        else:
            measure(result, site, backend, options)
        results.append(result)
        print(line(result, f"{number}/{len(sites)}"), flush=True)
        if options.json:
            write(options.json, machine, results, {})
        mx.clear_cache()
    states = remembered(sites, backend) if backend.name and time.perf_counter() - start < options.budget else {}
    if options.json:
        write(options.json, machine, results, states)
    bad = [result for result in results if result.verdict != "equal"]
    for result in bad:
        print(f"{result.verdict}: {result.size} {result.site}: {result.failed}", flush=True)
    print(f"{len(results) - len(bad)} of {len(results)} sites equal, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if bad or not results else 0


def describe(commit: str | None) -> dict[str, str]:
    info = mx.device_info()
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": commit or "unknown",
        "device": f"{mx.default_device()}, {info.get('device_name', 'unknown')}",
        "machine": platform.platform(),
        "packages": ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm")),
    }


def measure(result: Result, site: Site, backend: Backend, options: argparse.Namespace) -> None:
    try:
        result.plain_values, result.plain_differs = count(site, lambda *one: oracle(site, one), site.plain, 6)
        rows_values, rows_differ = count(site, lambda *one: oracle(site, one), site.plain, 3, rows_of(site))
        result.plain_values += rows_values
        result.plain_differs += rows_differ
        if not backend.name:
            return
        program = site.program(backend.name)
        call = launcher(site, program, backend.make(program), mx.bfloat16, several=True)
        inputs = site.inputs(0)
        mx.eval(inputs)
        begin = time.perf_counter()
        mx.eval(call(*inputs))
        result.compile_s = time.perf_counter() - begin
        seen = site.observed(call)
        result.values, result.kernel_differs = count(site, site.plain, seen, options.seeds or 2 * site.seeds)
        if not site.one_row:
            result.rows_values, result.rows_differ = count(site, site.plain, call, 8, ROWS)
        if not options.no_times:
            result.microseconds = times({"plain": site.plain, "kernel": call}, inputs, 50 if site.one_row else 200)
    except Exception as error:  # the other sites may still tell something
        result.failed = f"{type(error).__name__}: {first_lines(error, 8)}"


def rows_of(site: Site) -> int:
    return 1 if site.one_row else ROWS


def count(
    site: Site, wanted: Callable[..., Any], found: Callable[..., Any], seeds: int, rows: int = 1
) -> tuple[int, int]:
    """Values compared, values that differ."""
    values = differ = 0
    for seed in range(seeds):
        inputs = site.inputs(seed, rows)
        pairs = list(zip(listed(wanted(*inputs)), listed(found(*inputs)), strict=True))
        for a, b in pairs:
            if a.shape != b.shape or a.dtype != b.dtype:
                raise ValueError(f"{b.dtype} {b.shape}, expected {a.dtype} {a.shape}")
        counts = [different(a, b) for a, b in pairs]
        mx.eval(counts)
        values += sum(a.size for a, _ in pairs)
        differ += sum(int(one.item()) for one in counts)
    return values, differ


def listed(outputs: Any) -> list[mx.array]:
    return [outputs] if isinstance(outputs, mx.array) else list(outputs)


def times(calls: dict[str, Callable[..., Any]], inputs: tuple[Any, ...], repeats: int) -> dict[str, dict[str, float]]:
    """Medians over alternated rounds, in microseconds a call. The first round is not counted."""
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for _ in range(8):
        for name, call in calls.items():
            samples[name].append(one_round(call, inputs, repeats))
    return {
        name: {
            part: 1e6 * statistics.median(one[index] for one in rounds[1:]) / repeats
            for index, part in enumerate(("build", "dispatch", "wall"))
        }
        for name, rounds in samples.items()
    }


def one_round(call: Callable[..., Any], inputs: tuple[Any, ...], repeats: int) -> tuple[float, float, float]:
    mx.synchronize()
    start = time.perf_counter()
    outputs = [call(*inputs) for _ in range(repeats)]
    built = time.perf_counter()
    flat = outputs if isinstance(outputs[0], mx.array) else [array for output in outputs for array in output]
    begin = time.perf_counter()
    mx.async_eval(flat)
    dispatched = time.perf_counter()
    mx.synchronize()
    return built - start, dispatched - begin, time.perf_counter() - begin


def remembered(sites: list[tuple[str, Site]], backend: Backend) -> dict[str, tuple[str, str]]:
    """The package's own self-check over a few sites, then again from what it remembers."""
    few = [site for _, site in sites][:6]
    for what in ("self-check", "remembered"):
        forget()
        start = time.perf_counter()
        resolve_all(few)
        print(f"{what} of {len(few)} sites on {backend.device}: {time.perf_counter() - start:.2f} s", flush=True)
        for site, (state, reason) in report().items():
            print(f"   {state:<7} {site}: {reason}", flush=True)
    return {repr(site): found for site, found in report().items()}


HEAD = (
    f"{'':>7} {'size':<4} {'compile':>8} {'values':>9} {'rows':>8} {'plain':>8}  "
    f"{'plain: build+dispatch (wall)':>28}  {'kernel':>22}  verdict, site"
)


def line(result: Result, number: str) -> str:
    spent = [
        "{build:.1f}+{dispatch:.1f} ({wall:.1f})".format(**result.microseconds[name]) if result.microseconds else "-"
        for name in ("plain", "kernel")
    ]
    return (
        f"{number:>7} {result.size:<4} {result.compile_s:>6.2f} s {result.values:>9} {result.rows_values:>8} "
        f"{result.plain_values:>8}  {spent[0]:>28}  {spent[1]:>22}  {result.verdict}  {result.site}"
        + (f"\n        {result.failed}" if result.failed else "")
    )


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Site]]:
    """Each site once, under the first size that has it: the cheap ones of all sizes, then products, then joints."""
    seen: set[Site] = set()
    for kinds in (small_sites, large_sites, joints):
        for size in options.sizes:
            for site in kinds(size, config_of(size), options):
                if site not in seen and options.sites in repr(site):
                    seen.add(site)
                    yield size, site


def config_of(size: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ROOT / f"codegen/specs/gemma4_{size}.config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


def small_sites(size: str, text: dict[str, Any], options: argparse.Namespace) -> Iterator[Site]:
    hidden, eps = text["hidden_size"], text["rms_norm_eps"]
    experts, per_layer = text.get("enable_moe_block"), text["hidden_size_per_layer_input"]
    yield ResidualNorms(hidden, eps, scaled=False, norms=3 if experts else 1)
    yield DualResidualNorms(hidden, eps) if experts else ResidualNorms(hidden, eps, scaled=True, norms=1)
    if per_layer:
        yield ResidualNorms(hidden, eps, scaled=False, norms=0)
        yield PerLayerGate(per_layer, text["num_hidden_layers"])
    yield from ropes(text)
    for width in widths(text):
        yield Geglu(width)
    if experts:
        yield Geglu(text["moe_intermediate_size"], joined=False, experts=text["top_k_experts"])
        yield Geglu(text["moe_intermediate_size"], joined=True, experts=text["top_k_experts"])


def ropes(text: dict[str, Any]) -> Iterator[QKVRope]:
    eps, heads, same = text["rms_norm_eps"], text["num_attention_heads"], bool(text["attention_k_eq_v"])
    kv, full_kv = text["num_key_value_heads"], text.get("num_global_key_value_heads")
    dim, full_dim = text["head_dim"], text["global_head_dim"]
    theta = text["rope_parameters"]["sliding_attention"]["rope_theta"]
    yield QKVRope(heads, kv, dim, eps, theta)
    yield QKVRope(heads, full_kv or kv, full_dim, eps, None, same)
    for shape in ((heads, kv, dim), (heads, full_kv or kv, full_dim)):
        if shape[1] > 1:
            yield AttentionScores(*shape)
    if text["num_kv_shared_layers"]:
        yield QKVRope(heads, 0, dim, eps, theta)
        yield QKVRope(heads, 0, full_dim, eps)


def large_sites(size: str, text: dict[str, Any], options: argparse.Namespace) -> Iterator[Site]:
    hidden = text["hidden_size"]
    for width in widths(text):
        yield QuantizedMatvec(hidden, 2 * width, glu=True)
        yield QuantizedMatvec(width, hidden)
    yield QuantizedMatvec(hidden, text["vocab_size"])
    if text["hidden_size_per_layer_input"]:
        for bits in (4, 8):
            yield QuantizedPerLayerGate(hidden, text["hidden_size_per_layer_input"], text["num_hidden_layers"], bits)
    if text.get("enable_moe_block"):
        yield Router(text["num_experts"], text["top_k_experts"])
        yield QuantizedRouter(hidden, text["num_experts"], text["top_k_experts"])
        yield GatedExperts(hidden, text["moe_intermediate_size"], text["top_k_experts"])
        yield SummedExperts(text["moe_intermediate_size"], hidden, text["top_k_experts"])
    if size in ("12b", "26b"):
        yield QuantizedMatvec(hidden, 2 * widths(text)[0], bits=8, glu=True)
        yield QuantizedMatvec(widths(text)[0], hidden, bits=8)
    if size == "e4b":
        for bits, group in ((4, 32), (4, 128), (8, 32), (8, 128)):
            yield QuantizedMatvec(hidden, hidden, bits, group)


def joints(size: str, text: dict[str, Any], options: argparse.Namespace) -> Iterator[Site]:
    """Products and their readers in one launch: all of 4 bits, and of 8 bits those of E2B."""
    hidden, eps = text["hidden_size"], text["rms_norm_eps"]
    per_layer, layers = text["hidden_size_per_layer_input"], text["num_hidden_layers"]
    for bits in (4, 8) if size == "e2b" else (4,):
        for rope in ropes(text):
            product = QuantizedMatvec(hidden, rope.unit, bits)
            yield ProductHeads(product, rope)
            # A reader of shared K/V in place differs by a shape alone.
            if rope.kv_heads:
                yield ProductHeads(product, QKVRopeInto(rope))
        if per_layer:
            yield PerLayerEnd(
                ResidualNorms(hidden, eps, scaled=False, norms=0),
                QuantizedPerLayerGate(hidden, per_layer, layers, bits),
                QuantizedMatvec(per_layer, hidden, bits),
                ResidualNorms(hidden, eps, scaled=True, norms=1),
            )


def widths(text: dict[str, Any]) -> tuple[int, ...]:
    width = text["intermediate_size"]
    return (width, 2 * width) if text.get("use_double_wide_mlp") and text["num_kv_shared_layers"] else (width,)


def write(path: Path, machine: dict[str, str], results: list[Result], states: dict[str, tuple[str, str]]) -> None:
    rows = [asdict(result) | {"verdict": result.verdict} for result in results]
    path.write_text(json.dumps({"machine": machine, "sites": rows, "states": states}, indent=1) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="which, in order (default: %(default)s)")
    parser.add_argument("--sites", default="", help="only sites whose text has this in it, such as QKVRope")
    parser.add_argument(
        "--seeds", type=int, default=0, help="inputs of each comparison (default: twice the self-check's)"
    )
    parser.add_argument("--no-times", action="store_true", help="compare only")
    parser.add_argument(
        "--budget", type=float, default=225.0, help="seconds after which no site is begun (default: 225)"
    )
    parser.add_argument("--json", type=Path, help="write the record here, after each site")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    options = parser.parse_args(arguments)
    options.sizes = options.sizes.split(",")
    for size in options.sizes:
        if size not in SIZES:
            parser.error(f"--sizes has {size!r}; expected some of {','.join(SIZES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
