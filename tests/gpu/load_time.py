"""How long until the first token, in fresh processes: mlx-lm, straightline without kernels of its own, and with them
(first process of an empty cache folder, then a second one), each in parts. Then what a kernel's call costs the host.
Exits with 1 if a process failed, or MLX's text of a kernel is not ours. On a CPU: --toy --no-calls.

Random 4-bit weights of full size; downloads nothing. About 75 s on an H200 (E4B and 12B) where MLX has compiled its own
kernels before (run it last); where it has not, the first row takes a minute more, and --bare makes it so. It finds the
code of the checkout that it lies in by itself, whatever PYTHONPATH says; MLX and mlx-lm must be importable:

    python3 tests/gpu/load_time.py [--sizes e4b,12b] [--bare] [--no-calls] [--no-load] [--budget 100]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("codegen", "templates", "generated", "runtime")
SIZES = ("e4b", "12b")
# Mode and what it is called. What MLX compiles for itself it keeps, so the first row is not like those after it.
MODES = (
    ("mlx-lm", "mlx-lm, first"),
    ("kernels", "kernels, first process"),
    ("kernels", "kernels, second process"),
    ("mlx-lm", "mlx-lm"),
    ("off", "without kernels"),
    ("kernels", "kernels, third process"),
)
PARTS = ("bind", "resolve", "lay", "compare", "check")
PROMPT = 5  # from 8 on MLX compiles products of its own, for half a minute each on a bare machine


def main() -> int:
    options = parse()
    if options.child:
        return child(options)
    begin, failed = time.perf_counter(), 0
    with tempfile.TemporaryDirectory(prefix="straightline-load-") as work:
        environment = prepared(Path(work), options.bare)
        if not options.no_load:
            print(f"{'seconds':<30} {'start':>6} {'load':>7} {'first':>7} {'second':>7}  " + parts_head(), flush=True)
            for number, size in enumerate(options.sizes):
                environment["STRAIGHTLINE_CACHE"] = str(Path(work, f"cache-{size}"))
                for mode, title in MODES if number == 0 else MODES[:4]:
                    if time.perf_counter() - begin > options.budget:
                        print(f"{size} {title}: not reached within {options.budget} s", flush=True)
                        continue
                    result = run(environment, mode, size, options.toy)
                    show(f"{size} {title}", result)
                    failed += not result
        if not options.no_calls:
            failed += not run(environment, "calls", "e4b")
    print(f"load_time: {failed} failed, {time.perf_counter() - begin:.0f} s", flush=True)
    return int(failed > 0)


def parts_head() -> str:
    return " ".join(f"{part:>8}" for part in PARTS) + "   (lay and compare lie in resolve; resolve in load)"


def prepared(work: Path, bare: bool) -> dict[str, str]:
    """An environment in which `straightline` is this checkout. bare: and MLX has compiled nothing yet."""
    (work / "path/straightline").mkdir(parents=True)
    for folder in FOLDERS:
        (work / "path/straightline" / folder).symlink_to(ROOT / folder)
    path = os.pathsep.join(filter(None, (str(work / "path"), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "STRAIGHTLINE_CACHE": str(work / "cache")}
    return os.environ | own | ({"MLX_PTX_CACHE_DIR": str(work / "ptx")} if bare else {})


def run(environment: dict[str, str], mode: str, size: str, toy: bool = False) -> dict[str, Any]:
    """One child's result, empty if it failed; what it prints beside that is passed on."""
    command = [sys.executable, __file__, "--child", mode, "--sizes", size, "--started", repr(time.time())]
    command += ["--toy"] * toy
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    except subprocess.TimeoutExpired as error:
        print(f"   {mode} {size}: over 100 s; {str(error.stdout)[-500:]}", flush=True)
        return {}
    *lines, last = done.stdout.splitlines() or [""]
    if not last.startswith("{"):
        lines, last = [*lines, last], "{}"
    for line in lines:
        print(f"   {line}", flush=True)
    if done.returncode:
        print(f"   {mode} {size} exits with {done.returncode}: {done.stderr[-1500:]}", flush=True)
        return {}
    result: dict[str, Any] = json.loads(last)
    return result


def show(title: str, result: dict[str, Any]) -> None:
    if not result:
        print(f"{title:<30} FAILED", flush=True)
        return
    parts = " ".join(f"{result['parts'].get(part, 0.0):>8.2f}" for part in PARTS)
    times = " ".join(f"{result[key]:>7.2f}" for key in ("load", "first", "second"))
    print(f"{title:<30} {result['start']:>6.2f} {times}  {parts}  {result['note']}", flush=True)
    sites = {name: spent for name, spent in result["parts"].items() if " " in name and spent >= 0.02}
    if sites:
        print("      " + ", ".join(f"{name} {spent:.2f}" for name, spent in sites.items()), flush=True)


# In the child


def child(options: argparse.Namespace) -> int:
    if options.child == "calls":
        failed = calls()
        print(json.dumps({"failed": failed}))
        return int(failed > 0)
    result = load(options.child, options.sizes[0], options.toy)
    result["start"] -= options.started
    print(json.dumps(result))
    return 0


def load(mode: str, size: str, toy: bool) -> dict[str, Any]:
    """start: when weights are there; load: until the model can be called; first, second: until a token is known."""
    import mlx.core as mx

    from straightline.runtime.verification.random_model import build

    config = json.loads((ROOT / f"codegen/specs/gemma4_{size}.config.json").read_text())
    if toy:
        from straightline.runtime.verification.smaller import reduced

        config = reduced(config)
    built, oracle = build(config, mx.bfloat16)
    mx.synchronize()
    started = time.time()
    parts: dict[str, float] = {}
    begin = time.perf_counter()
    model, note = oracle, ""
    if mode != "mlx-lm":
        from straightline.runtime import specialize

        timed_parts(parts)
        model = specialize(built, strict=True, kernels=mode == "kernels", generate=toy)
    loaded = time.perf_counter()
    cache = model.make_cache()
    token = mx.argmax(model(mx.arange(PROMPT)[None] + 5, cache=cache)[:, -1:], axis=-1)
    values = [token.item()]
    first = time.perf_counter()
    values.append(mx.argmax(model(token, cache=cache)[:, -1:], axis=-1).item())
    second = time.perf_counter()
    if mode != "mlx-lm":
        from straightline.runtime.kernels import report

        states = [state for state, _ in report().values()]
        odd = [f"{type(s).__name__} {state}: {why}" for s, (state, why) in report().items() if "anew" in why]
        failed = [f"{type(s).__name__}: {why}" for s, (_, why) in report().items() if "fail" in why or "differ" in why]
        note = f"{states.count('kernel')} kernels; {model.dispatch.decode_reason} " + " | ".join((odd + failed)[:2])
    return {
        "start": started,
        "load": loaded - begin,
        "first": first - begin,
        "second": second - begin,
        "parts": parts,
        "note": f"tokens {values}; {note}",
    }


def timed_parts(parts: dict[str, float]) -> None:
    """Replaces the functions that loading consists of by timed ones."""
    from straightline.runtime import bound

    resolving = sys.modules["straightline.runtime.kernels.resolve"]
    for module, name, part in (
        (bound, "bind", "bind"),
        (bound, "resolve_all", "resolve"),
        (sys.modules["straightline.runtime.kernels.ahead"], "lay", "lay"),
        (resolving, "compare", "compare"),
        (bound, "decode_refused", "check"),
    ):
        if hasattr(module, name):
            setattr(module, name, timed(getattr(module, name), parts, part))


def timed(call: Callable[..., Any], parts: dict[str, float], part: str) -> Callable[..., Any]:
    def timing(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            spent = time.perf_counter() - begin
            names = (part, f"{part} {type(arguments[0]).__name__}") if part == "compare" else (part,)
            for name in names:
                parts[name] = parts.get(name, 0.0) + spent

    return timing


def calls() -> int:
    """How many parts failed."""
    failed = 0
    for part in (compare_texts, compile_times, call_times):
        try:
            part()
        except Exception:
            failed += 1
            print(f"{part.__name__}: {traceback.format_exc()[-1500:]}", flush=True)
    return failed


def sites() -> list[Any]:
    from straightline.runtime.kernels import Geglu, PerLayerGate, QKVRope, QuantizedMatvec, ResidualNorms

    return [
        ResidualNorms(2560, 1e-06, scaled=True, norms=1),
        ResidualNorms(2560, 1e-06, scaled=False, norms=1),
        QKVRope(8, 2, 256, 1e-06, 10000.0),
        QKVRope(8, 2, 512, 1e-06),
        QKVRope(8, 0, 256, 1e-06, 10000.0),
        PerLayerGate(256, 42),
        Geglu(10240),
        QuantizedMatvec(2560, 20480, glu=True),
        QuantizedMatvec(10240, 2560),
    ]


def compare_texts() -> None:
    """Is what MLX makes of a kernel what we think it does? Then it finds what is laid for it."""
    import mlx.core as mx

    from straightline.runtime.kernels import ahead, mlx_source
    from straightline.runtime.kernels.backends import detect, header_of
    from straightline.runtime.kernels.launch import launcher

    backend = detect()
    print(f"{backend}; MLX keeps kernels in {mlx_source.folder(ahead.MLX)}; headers {mlx_source.include_folders()}")
    equal = 0
    for site in sites():
        program = site.program("cuda")
        kernel = backend.make(program)

        def aloud(*, _kernel: Any = kernel, **launch: Any) -> Any:
            return _kernel(**launch, verbose=True)

        found = printed(lambda s=site, p=program, k=aloud: launcher(s, p, k, mx.bfloat16, False)(*s.inputs(0)))
        found = found.partition("```\n")[2].rpartition("\n```")[0]
        taken = first_call(site, program)
        ours = mlx_source.text(program, backend.kernel_name(program), header_of(program), *taken)
        equal += found == ours
        if found != ours:
            print(f"text differs for {site}: MLX {found!r}, ours {ours!r}")
        laid = ahead.lay(program, *taken, backend)
        begin = time.perf_counter()
        mx.eval(launcher(site, program, kernel, mx.bfloat16, False)(*site.inputs(0)))
        spent = time.perf_counter() - begin
        print(f"{program.name}: laid {[path.name for path in laid.files]} {laid.reason}, first call {spent:.3f} s")
    print(f"texts equal: {equal} of {len(sites())}", flush=True)
    if equal < len(sites()):
        raise ValueError("what MLX makes of a kernel is not what is laid for it")


def first_call(site: Any, program: Any) -> tuple[list[Any], list[Any]]:
    """The inputs and the output dtypes that a site hands to its kernel. Nothing is computed."""
    import mlx.core as mx

    from straightline.runtime.kernels.launch import launcher

    seen: list[Any] = []

    def kernel(*, inputs: Any, output_dtypes: Any, output_shapes: Any, **launch: Any) -> Any:
        seen.extend((list(inputs), list(output_dtypes)))
        return [mx.zeros(shape, mx.bfloat16) for shape in output_shapes]

    launcher(site, program, kernel, mx.bfloat16, False)(*site.inputs(0))
    return seen[0], seen[1]


def printed(call: Callable[[], Any]) -> str:
    """What C++ prints to standard output meanwhile."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            call()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def compile_times() -> None:
    """Seconds to compile every kernel, nothing kept: by us, one after the other and several at once; by MLX."""
    import shutil
    from concurrent.futures import ThreadPoolExecutor

    import mlx.core as mx

    from straightline.runtime.kernels import ahead
    from straightline.runtime.kernels.backends import detect
    from straightline.runtime.kernels.launch import launcher

    backend = detect()
    programs = [(site, site.program("cuda")) for site in sites()]
    jobs = [(program, *first_call(site, program), backend) for site, program in programs]
    for threads in (1, 4, 16):
        shutil.rmtree(Path(os.environ["STRAIGHTLINE_CACHE"]) / "kernels", ignore_errors=True)
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda job: ahead.compiled(*job), jobs))
        print(f"ours, {len(jobs)} kernels, {threads} at once: {time.perf_counter() - begin:.2f} s", flush=True)
    for site in sites()[2:3]:
        program = site.program("cuda")
        kernel = made(f"{program.name}_other", program, f"\n{program.text}\n")
        inputs = site.inputs(0)
        begin = time.perf_counter()
        mx.eval(launcher(site, program, kernel, mx.bfloat16, False)(*inputs))
        print(f"MLX's own, 1 kernel: {time.perf_counter() - begin:.2f} s", flush=True)


def made(name: str, program: Any, header: str) -> Any:
    import mlx.core as mx

    return mx.fast.cuda_kernel(
        name=name,
        input_names=list(program.inputs),
        output_names=list(program.outputs),
        source=program.source,
        header=header,
    )


def call_times() -> None:
    """Host microseconds a call, 2,000 calls: as before this was laid, as it is, and by the public ways of MLX."""
    import mlx.core as mx

    from straightline.runtime.kernels import ahead
    from straightline.runtime.kernels.backends import detect, header_of
    from straightline.runtime.kernels.launch import launcher

    backend = detect()
    for site in sites()[0:3:2]:
        program = site.program("cuda")
        inputs = site.inputs(0)
        mx.eval(inputs)
        names, code = ahead.compiled(program, *first_call(site, program), backend)
        lowered = names.partition("\t")[2]

        def precompiled(*, inputs: Any, _code: bytes = code, _name: str = lowered, **launch: Any) -> Any:
            return mx.fast.precompiled_cuda_kernel(
                name=_name, compiled_source=_code, inputs=list(inputs), scalars=[], **launch
            )

        kernels = {
            "before": made(program.name, program, header_of(program)),
            "laid": backend.make(program),
            f"precompiled, {len(code)} bytes": precompiled,
        }
        ready = {}
        for name, kernel in kernels.items():
            try:
                call = launcher(site, program, kernel, mx.bfloat16, False)
                mx.eval(call(*inputs))
                ready[name] = call
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
        for _ in range(5):
            for name, call in ready.items():
                samples[name].append(one_round(call, inputs))
        for name, found in samples.items():
            build, dispatch = (sorted(column)[len(column) // 2] for column in zip(*found[1:], strict=True))
            print(
                f"{program.function:<16} {name:<26} build {build:.2f} + dispatch {dispatch:.2f} us a call", flush=True
            )


def one_round(call: Callable[..., Any], inputs: tuple[Any, ...], repeats: int = 2000) -> tuple[float, float]:
    import mlx.core as mx

    mx.synchronize()
    begin = time.perf_counter()
    outputs = [call(*inputs) for _ in range(repeats)]
    built = time.perf_counter()
    mx.async_eval(outputs)
    dispatched = time.perf_counter()
    mx.synchronize()
    return 1e6 * (built - begin) / repeats, 1e6 * (dispatched - built) / repeats


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="which, in order (default: %(default)s)")
    parser.add_argument("--no-load", action="store_true", help="only the host cost of a call, and compile times")
    parser.add_argument("--no-calls", action="store_true", help="only seconds to the first token")
    parser.add_argument("--bare", action="store_true", help="as where MLX has compiled nothing of its own before")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds after which no load is begun")
    parser.add_argument("--toy", action="store_true", help="small models (needs the codegen extra)")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sizes = options.sizes.split(",")
    return options


if __name__ == "__main__":
    sys.exit(main())
