"""What taps cost at full size: tokens per second, peak memory of a long prompt, and graph primitives, with and without.

E4B with random 4-bit weights; downloads nothing. Expected time on one H200: 60 s (`--seconds` bounds the decoding; the
rest takes some 15 s). Exits with 1 if a part failed or a figure is outside its bound (--strict: the times, too).

    . tests/gpu/path.sh && python3 tests/gpu/tap_cost.py
    python tests/gpu/tap_cost.py --toy --seconds 5 --tokens 8 --prompt 64        (without a GPU)
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
from typing import Any

import mlx.core as mx
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
ROUNDS = 9  # the first is not counted


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
        f"file {model.dispatch.file}, one token {model.dispatch.decode_reason or 'by decode'}, "
        f"kernels {'on' if options.kernels else 'off'}, taps {list(layers)}, {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    parts: dict[str, Callable[[], list[str]]] = {
        "primitives": lambda: primitives(model, layers, text["vocab_size"]),
        "memory": lambda: memory(model, layers, text, options),
        "decode": lambda: decode(model, layers, text["vocab_size"], options),
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
    turn is what a prompt needs.
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


class Side:
    """One way to decode, with caches of its own. rates: tokens per second of each round."""

    def __init__(self, call: Call, base: str) -> None:
        self.call = call
        self.base = base
        self.rates: list[float] = []
        self.builds: list[float] = []
        self.singles: list[float] = []

    def single(self, token: mx.array) -> None:
        """Seconds of one token, from its graph to its number."""
        begun = time.perf_counter()
        following, _ = self.next(token)
        following.item()
        self.singles.append(time.perf_counter() - begun)

    def round(self, token: mx.array, tokens: int) -> None:
        """As mlx-lm's loop: the next token is asked for before the last one is read."""
        rows: Rows = {}
        token, rows = self.next(token)
        start = time.perf_counter()
        building = 0.0
        for _ in range(tokens):
            begun = time.perf_counter()
            logits, rows = self.call(token)
            building += time.perf_counter() - begun
            following = greedy(logits)
            mx.async_eval(following, *rows.values())
            token.item()
            token = following
        self.rates.append(tokens / (time.perf_counter() - start))
        self.builds.append(building / tokens)
        mx.synchronize()

    def next(self, token: mx.array) -> tuple[mx.array, Rows]:
        logits, rows = self.call(token)
        following = greedy(logits)
        mx.async_eval(following, *rows.values())
        return following, rows


def decode(model: Any, layers: tuple[int, ...], vocabulary: int, options: argparse.Namespace) -> list[str]:
    """Rounds that take turns, each with another side first; rates over those of the base in the same rounds."""
    prompt = ids_of(options.context, vocabulary)
    token = mx.array([[23 % vocabulary]])

    def bare(run: Any) -> Call:
        caches = filled(model, prompt)
        return lambda ids: (run(ids, cache=caches), {})

    def a_tap_each(run: Any) -> Call:
        caches = filled(model, prompt)

        def call(ids: mx.array) -> tuple[mx.array, Rows]:
            tap = HiddenTap(layers)
            return run(ids, cache=caches, tap=tap), tap.captured

        return call

    def recorded(run: Any) -> Call:
        """What happens inside `model.tapped`: one recorder keeps the rows of all forwards, none evaluated."""
        caches = filled(model, prompt)
        recorder = TapRecorder(layers)
        return lambda ids: (run(ids, cache=caches, tap=recorder), {})

    sides = {
        "no tap": Side(bare(model), "no tap"),
        "no tap, again": Side(bare(model), "no tap"),
        "HiddenTap each": Side(a_tap_each(model), "no tap"),
        "model.tapped": Side(recorded(model), "no tap"),
        "monolith": Side(bare(model.monolith), "monolith"),
        "monolith, HiddenTap each": Side(a_tap_each(model.monolith), "monolith"),
    }
    names = list(sides)

    def in_turn(number: int, step: Callable[[Side], None]) -> None:
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            step(sides[name])

    start = time.perf_counter()
    number = 0
    while number < ROUNDS or time.perf_counter() - start < options.seconds:
        in_turn(number, lambda side: side.round(token, options.tokens))
        number += 1
        if number == 1:
            for side in sides.values():  # the first round warms up
                side.rates.clear()
                side.builds.clear()
    print(f"{number - 1} rounds of {options.tokens} tokens a side after {options.context}, one round before them")
    wrong = [found for name, side in sides.items() if (found := line(name, side, sides[side.base], options))]
    for number in range(options.singles):
        in_turn(number, lambda side: side.single(token))
    print(f"single tokens in turn, {options.singles} a side, each waited for:")
    for name, side in sides.items():
        base = sides[side.base].singles
        q25, median, q75 = (
            SECOND * one for one in statistics.quantiles([a - b for a, b in zip(side.singles, base, strict=True)], n=4)
        )
        print(
            f"{name:<26} {1e3 * statistics.median(side.singles):.3f} ms; {median:+.0f} us [{q25:+.0f} to {q75:+.0f}], "
            f"{100 * median / SECOND / statistics.median(base):+.2f} %",
            flush=True,
        )
    return wrong


def line(name: str, side: Side, base: Side, options: argparse.Namespace) -> str:
    """Prints one side; what is outside its bound, or empty."""
    q25, median, q75 = statistics.quantiles([a / b for a, b in zip(side.rates, base.rates, strict=True)], n=4)
    times = statistics.median([1 / a - 1 / b for a, b in zip(side.rates, base.rates, strict=True)])
    build = statistics.median(side.builds) - statistics.median(base.builds)
    print(
        f"{name:<26} {statistics.median(side.rates):7.1f} tok/s (best {max(side.rates):.1f}); x{median:.4f} "
        f"[{q25:.4f}-{q75:.4f}] of {'itself' if side is base else 'its base'}, best over best "
        f"x{max(side.rates) / max(base.rates):.4f}; {SECOND * times:+.0f} us a token, {SECOND * build:+.0f} to build",
        flush=True,
    )
    slow = median < 0.99 and "again" not in name
    return f"{name}: x{median:.4f}, expected 0.99 or more" if slow and options.strict else ""


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
    parser.add_argument("--kernels", action="store_true", help="with fused kernels (some 45 s more to compile them)")
    parser.add_argument("--tokens", type=int, default=40, help="of a round (default: %(default)s)")
    parser.add_argument("--context", type=int, default=600, help="tokens before (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of rounds, or 9 rounds (default: %(default)s)")
    parser.add_argument("--singles", type=int, default=150, help="single tokens in turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="of the memory part (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the memory part (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk there (default: %(default)s)")
    parser.add_argument("--skip", action="append", default=[], choices=("primitives", "memory", "decode"))
    parser.add_argument("--strict", action="store_true", help="exit with 1 where decoding slows by 1 per cent or more")
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
