"""What taps cost at full size: time of a token, graph primitives, peak memory of a long prompt, with and without.

E4B with random 4-bit weights; downloads nothing. Decoding comes first and ends when it knows enough, after --seconds at
most; the rest takes some 15 s on an H200. Exits with 1 if a part failed, tokens differ, or a figure is outside its
bound (decoding: if the whole interval is; --strict: if any of it is).

    . tests/gpu/path.sh && python3 tests/gpu/tap_cost.py
    python tests/gpu/tap_cost.py --toy --seconds 5 --prompt 64        (without a GPU)
"""

import argparse
import gc
import io
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
from alternated import Interval, interval, order, slower
from full_size import config_of
from machine import describe

from straightline.runtime import HiddenTap, specialize
from straightline.runtime.taps import TapRecorder
from straightline.runtime.verification.random_model import build, size_in_gb

LAYERS = (5, 11, 17, 29, 41, 42)
TOY_LAYERS = (0, 1, 2, 3, 5, 6)
Rows = dict[int, mx.array]
Call = Callable[[mx.array], tuple[mx.array, Rows]]
SECOND = 1e6
BASE, TAPPED, CONTROL = "no tap", ("HiddenTap each", "model.tapped"), "no tap, again"
BOUND = 0.01  # by which decoding may slow down
WARM_UP, FEWEST, CHECK_EVERY = 8, 80, 60  # turns


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for key, value in describe(options.commit).items():
        print(f"{key:<9} {value}", flush=True)
    start = time.perf_counter()
    config = config_of("e4b", argparse.Namespace(toy=options.toy, layers=None, vocab=None, window=None))
    built, _ = build(config, getattr(mx, options.dtype))
    model = specialize(built, generate=options.toy, kernels=options.kernels)
    text = config.get("text_config", config)
    layers = TOY_LAYERS if options.toy else LAYERS
    print(
        f"model     e4b{' toy' if options.toy else ''}, {size_in_gb(built):.2f} GB, {options.dtype}, "
        f"file {model.dispatch.file}, one token {model.dispatch.decode_reason or 'by decode'}, kernels "
        f"{'by default' if options.kernels is None else options.kernels}, K/V in place: "
        f"{model.dispatch.in_place_reason or 'yes'}, taps {list(layers)}, {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    parts: dict[str, Callable[[], list[str]]] = {
        "decode": lambda: decode(model, layers, text["vocab_size"], options),
        "primitives": lambda: primitives(model, layers, text["vocab_size"]),
        "memory": lambda: memory(model, layers, text, options),
    }
    wrong = []
    for name, part in parts.items():
        if name in options.skip:
            continue
        print(f"\n== {name}", flush=True)
        try:
            wrong += part()
        except Exception:  # the next part may still tell something
            traceback.print_exc(file=sys.stdout)
            wrong.append(f"{name} stopped")
        gc.collect()
        mx.clear_cache()
    counts = model.dispatch.counts
    print(f"\nforwards {counts}, {time.perf_counter() - start:.0f} s")
    print("\n".join(f"OUTSIDE: {one}" for one in wrong) or "all within their bounds", flush=True)
    return 1 if wrong else 0


# Primitives


def primitives(model: Any, layers: tuple[int, ...], vocabulary: int) -> list[str]:
    """Of one token after five, and of a prompt of 16: asked for with the rows among the outputs."""
    wrong = []
    for what, lengths in (("one token", (5, 1)), ("16 tokens", (16,))):
        for path, run in paths(model).items():
            found = {}
            for name, tap in (
                ("no tap", None),
                ("six taps", HiddenTap(layers)),
                ("position=-1", HiddenTap(layers, position=-1)),
            ):
                caches = model.make_cache()
                for length in lengths[:-1]:
                    mx.eval(run(ids_of(length, vocabulary), cache=caches), [one.state for one in caches])
                logits = run(ids_of(lengths[-1], vocabulary), cache=caches, tap=tap)
                found[name] = count(logits, *(tap.captured.values() if tap else ()))
            print(f"{what}, {path}: " + ", ".join(f"{name} {number}" for name, number in found.items()), flush=True)
            if found["six taps"] != found["no tap"]:
                wrong.append(f"{what}, {path}: {found['six taps'] - found['no tap']} primitives more with six taps")
    return wrong


def count(*outputs: mx.array) -> int:
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return len(re.findall(r"shape\s*=\s*rectangle", text.getvalue()))


def paths(model: Any) -> dict[str, Callable[..., mx.array]]:
    return {"generated": model, "monolith": model.monolith}


def ids_of(length: int, vocabulary: int) -> mx.array:
    return mx.array([[(7919 * index) % vocabulary for index in range(length)]])


# Memory


def memory(model: Any, layers: tuple[int, ...], text: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Peak of one forward over a prompt, and of mlx-lm's chunks; then what is held when only the rows are kept.

    A GPU frees what it has finished with, so the peak depends on how far the host is ahead: the least of some runs in
    turn is what a prompt needs. jobs.txt has settings under which a host should not be ahead at all (not tried yet).
    """
    wrong = []
    ids = ids_of(options.prompt, text["vocab_size"])
    row_bytes = len(layers) * text["hidden_size"] * getattr(mx, options.dtype).size
    whole = options.prompt * row_bytes
    print(f"the rows of {len(layers)} taps over {options.prompt} tokens: {mb(whole)}; {options.repeats} runs in turn")
    for path, run in paths(model).items():
        for how in (one_forward, chunks):
            kind = HiddenTap if how is one_forward else TapRecorder
            makers: dict[str, Callable[[], Any]] = {
                "no tap": lambda: None,
                "six taps": lambda kind=kind: kind(layers),
                "position=-1": lambda kind=kind: kind(layers, -1),
            }
            how(run, model, ids, None, options.chunk)  # the warm-up
            runs: dict[str, list[tuple[int, int]]] = {name: [] for name in makers}
            for _ in range(options.repeats):
                for name, make in makers.items():
                    runs[name].append(how(run, model, ids, make(), options.chunk))
            least = min(peak for peak, _ in runs["no tap"])
            for name, found in runs.items():
                peaks = sorted(peak for peak, _ in found)
                held = max(one for _, one in found)
                more = peaks[0] - least
                median = statistics.median(peaks)
                print(
                    f"{path}, {how.__name__}, {name}: peak {mb(peaks[0])} at least, median {mb(median)}, "
                    f"{mb(peaks[-1])} at most; least {mb(more)} more ({more / whole:.3f} of the rows); "
                    f"rows kept hold {mb(held)}",
                    flush=True,
                )
                if more > 1.02 * whole + SLACK:
                    wrong.append(f"{path}, {how.__name__}, {name}: peak grows by {mb(more)}, rows are {mb(whole)}")
                rows = {"no tap": 0, "six taps": whole}.get(name, row_bytes * (-(-options.prompt // options.chunk)))
                if held > 1.02 * rows + SLACK:
                    wrong.append(f"{path}, {how.__name__}, {name}: {mb(held)} are held for rows of {mb(rows)}")
    return wrong


SLACK = 1 << 20  # allocations are rounded up


def one_forward(run: Any, model: Any, ids: mx.array, tap: Any, chunk: int) -> tuple[int, int]:
    """Peak over what was active before, and what the rows hold once all else is dropped."""
    before = settled()
    caches = model.make_cache()
    logits = run(ids, cache=caches, tap=tap)
    mx.eval(logits[:, -1], [one.state for one in caches], tap.captured if tap else [])
    peak = mx.get_peak_memory() - before
    del logits, caches
    return peak, settled() - before


def chunks(run: Any, model: Any, ids: mx.array, tap: Any, chunk: int) -> tuple[int, int]:
    """As mlx-lm reads a prompt: logits are never asked for."""
    before = settled()
    caches = model.make_cache()
    for at in range(0, ids.shape[1], chunk):
        run(ids[:, at : at + chunk], cache=caches, tap=tap)
        mx.eval([one.state for one in caches])
    mx.eval(tap.steps if tap else [])
    peak = mx.get_peak_memory() - before
    del caches
    return peak, settled() - before


def settled() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def mb(number: float) -> str:
    return f"{number / 1e6:.2f} MB"


# Decoding


class Way:
    """One way to decode, with caches of its own. around: what is opened for a round, outside of what is timed."""

    def __init__(self, call: Call, around: Callable[[], Any] = nullcontext) -> None:
        self.call = call
        self.around = around
        self.seconds: list[float] = []
        self.builds: list[float] = []
        self.chosen: list[int] = []

    def round(self, token: mx.array, tokens: int) -> None:
        """As mlx-lm's loop: the next token is asked for before the last one is read. The first token is not timed."""
        building = 0.0
        with self.around():
            token, _ = self.next(token)
            self.chosen.append(token.item())
            token, _ = self.next(token)
            start = time.perf_counter()
            for _ in range(tokens):
                following, spent = self.next(token)
                building += spent
                self.chosen.append(token.item())
                token = following
            self.seconds.append(time.perf_counter() - start)
            self.builds.append(building)
            self.chosen.append(token.item())
        mx.synchronize()

    def next(self, token: mx.array) -> tuple[mx.array, float]:
        """The greedy choice, on its way, and the seconds that the forward's graph took."""
        begun = time.perf_counter()
        logits, rows = self.call(token)
        spent = time.perf_counter() - begun
        following = greedy(logits)
        mx.async_eval(following, *rows.values())
        return following, spent


def decode(model: Any, layers: tuple[int, ...], vocabulary: int, options: argparse.Namespace) -> list[str]:
    """Short rounds that take turns (alternated.py), until the answer is known well enough or the time is up."""
    ways = ways_of(model, layers, ids_of(options.context, vocabulary))
    token = mx.array([[23 % vocabulary]])
    for number in range(WARM_UP):
        turn(ways, number, token, options.tokens)
    for way in ways.values():
        way.seconds.clear()
        way.builds.clear()
    gc.collect()
    gc.freeze()  # what is there now need not be looked at before each round
    start, done, found = time.perf_counter(), 0, {}
    while True:
        turn(ways, done, token, options.tokens)
        done += 1
        late = time.perf_counter() - start > options.seconds
        if done % CHECK_EVERY == 0 or late:
            found = {name: compared(ways, name) for name in (*TAPPED, CONTROL)}
            shown = ", ".join(f"{name} {one.median:+.2%} +- {one.half:.2%}" for name, one in found.items())
            print(f"   {done} turns: {shown}", flush=True)  # who is cut still tells something
            if late or (done >= FEWEST and known(found, options.within / 100)):
                break
    gc.unfreeze()
    spent = time.perf_counter() - start
    why = "when its time was up" if late else f"with all intervals within {options.within} %"
    print(f"{done} turns, {options.tokens} tokens a way in each, after {options.context} tokens and {WARM_UP} turns")
    print(f"ended after {spent:.0f} s, {why}; medians of the turns, with 95 % intervals", flush=True)
    for name, way in ways.items():
        print(told(name, way, ways[BASE], found.get(name), options.tokens), flush=True)
    wrong = [f"decode: {name} chose other tokens" for name, way in ways.items() if way.chosen != ways[BASE].chosen]
    return wrong + [one for name in TAPPED if (one := verdict(name, found[name], done, options.strict))]


def known(found: dict[str, Interval], within: float) -> bool:
    """All intervals are narrow, and the bound lies outside of the tapped ones."""
    apart = all(not found[name].low <= BOUND <= found[name].high for name in TAPPED)
    return apart and max(one.half for one in found.values()) < within


def turn(ways: dict[str, Way], number: int, token: mx.array, tokens: int) -> None:
    """Python's collector is off in a round, and has run before it."""
    four = list(ways.values())
    for which in order(number):
        gc.collect()
        gc.disable()
        try:
            four[which].round(token, tokens)
        finally:
            gc.enable()


def compared(ways: dict[str, Way], name: str) -> Interval:
    """How much slower than untapped; the tapped ways than both untapped ones."""
    bases = [BASE] if name == CONTROL else [BASE, CONTROL]
    return interval(slower(ways[name].seconds, [ways[base].seconds for base in bases]))


def told(name: str, way: Way, base: Way, cost: Interval | None, tokens: int) -> str:
    middle = statistics.median(way.seconds) / tokens
    line = f"{name:<16} {1e3 * middle:7.3f} ms a token (best {1e3 * min(way.seconds) / tokens:.3f})"
    if cost is None:
        return line
    build = statistics.median([mine - theirs for mine, theirs in zip(way.builds, base.builds, strict=True)]) / tokens
    found = f"{cost.median:+.2%} [{cost.low:+.2%} to {cost.high:+.2%}], {SECOND * cost.median * middle:+.0f} us"
    return f"{line}; {found}, {SECOND * build:+.1f} us of them to build"


def verdict(name: str, cost: Interval, turns: int, strict: bool) -> str:
    """Prints whether the bound is shown; what is outside of it, or empty."""
    claim = f"{name} slows decoding by less than {BOUND:.0%}"
    if turns < FEWEST or cost.low < BOUND <= cost.high:
        print(f"{claim}: neither shown nor refuted, {turns} turns, at most {cost.high:+.2%}")
        return f"decode: {name}: not shown" if strict else ""
    if cost.high < BOUND:
        print(f"{claim}: shown, at most {cost.high:+.2%}")
        return ""
    return f"decode: {name} slows by {cost.median:+.2%}, at least {cost.low:+.2%}; expected less than {BOUND:.0%}"


def ways_of(model: Any, layers: tuple[int, ...], prompt: mx.array) -> dict[str, Way]:
    """Four, each with caches of its own that hold the prompt."""

    def bare() -> Call:
        caches = filled(model, prompt)
        return lambda ids: (model(ids, cache=caches), {})

    def a_tap_each() -> Call:
        caches = filled(model, prompt)

        def call(ids: mx.array) -> tuple[mx.array, Rows]:
            tap = HiddenTap(layers)
            return model(ids, cache=caches, tap=tap), tap.captured

        return call

    return {
        BASE: Way(bare()),
        TAPPED[0]: Way(a_tap_each()),
        TAPPED[1]: Way(bare(), lambda: model.tapped(layers)),
        CONTROL: Way(bare()),
    }


def filled(model: Any, prompt: mx.array) -> list[Any]:
    caches: list[Any] = model.make_cache()
    mx.eval(model(prompt, cache=caches)[:, -1], [one.state for one in caches])
    return caches


def greedy(logits: mx.array) -> mx.array:
    token: mx.array = mx.argmax(logits[:, -1, :], axis=-1)[:, None]
    return token


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="a small model, shaped as E4B (needs the codegen extra)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, help="as specialize's (default: on CUDA)")
    parser.add_argument("--tokens", type=int, default=6, help="of a round (default: %(default)s)")
    parser.add_argument("--context", type=int, default=600, help="tokens before (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=75, help="of decoding, at most (default: %(default)s)")
    parser.add_argument(
        "--within",
        type=float,
        default=0.4,
        help="per cent to either side at which decoding ends (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=4, help="of the memory part (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the memory part (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk there (default: %(default)s)")
    parser.add_argument("--skip", action="append", default=[], choices=("decode", "primitives", "memory"))
    parser.add_argument("--strict", action="store_true", help="exit with 1 where the bound of decoding is not shown")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
