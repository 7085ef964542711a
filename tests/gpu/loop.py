"""The loop: tokens a second of mlx-lm's `generate_step` and of straightline's, E4B at full size, random 4-bit weights.

python3 tests/gpu/loop.py            about 50 s on an H200, and 15 to 70 for compiling kernels first
python3 tests/gpu/loop.py --reduced  toys, anywhere (needs the codegen extra)

`inline`: mlx-lm's loop on mlx-lm's model, mlx-lm's loop on the specialized one, ours with 1, 4, 8, 16 steps.
`overlap`: ours once more, a token being handed to the device in a second thread while the next one is built.
`served`: one request alone in mlx-lm's BatchGenerator, as its server runs it, on either model.
`answer`: from the prompt to the end of an answer of --answer tokens, whose end the loop does not know before.
`equal`: the tokens, log-probabilities, caches and random key of a generation that was stopped, byte for byte.
Sides take turns in every round; medians.
"""

import argparse
import faulthandler
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import mlx.core as mx
from machine import describe
from mlx_lm.generate import BatchGenerator
from mlx_lm.generate import generate_step as mlx_lm_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from straightline.runtime import specialize
from straightline.runtime.arrays import same_bits
from straightline.runtime.decoding import generate_step
from straightline.runtime.verification.proof import from_random

LIMIT = 140  # seconds, after which a hang is shown and ended
Generate = Callable[..., Iterator[tuple[int, mx.array]]]


class Sides:
    def __init__(self, options: argparse.Namespace) -> None:
        started = time.perf_counter()
        proof = from_random("gemma4-e4b", options.reduced, None, None, 7)
        print(f"model built in {time.perf_counter() - started:.1f} s", flush=True)
        started = time.perf_counter()
        self.oracle, self.model = proof.oracle, specialize(proof.model, strict=True, kernels=options.kernels)
        print(f"specialized in {time.perf_counter() - started:.1f} s; one token: ", end="")
        print(self.model.dispatch.decode_reason or "by decode", flush=True)
        self.prompt = mx.array([(7919 * index) % proof.vocabulary for index in range(options.context)])
        self.rates: dict[str, list[float]] = {}
        self.expected: list[int] = []
        self.wrong = False

    def all(self, names: list[str]) -> dict[str, Callable[..., Any]]:
        return {name: self.side(name) for name in names}

    def side(self, name: str) -> Callable[..., Any]:
        if name == "mlx-lm":
            return lambda **how: mlx_lm_step(self.prompt, self.oracle, **how)
        if name == "mlx-lm's loop":
            return lambda **how: mlx_lm_step(self.prompt, self.model, **how)
        if name.endswith("BatchGenerator"):
            model = self.oracle if name.startswith("mlx-lm:") else self.model
            return lambda **how: _served(model, self.prompt.tolist(), **how)
        steps, _, where = name.removeprefix("steps ").partition(" ")
        return lambda **how: generate_step(
            self.prompt, self.model, steps=int(steps), overlap=where == "overlapped", **how
        )

    def rate(self, side: Generate, tokens: int, skip: int = 31) -> tuple[float, list[int]]:
        """Tokens a second behind the first 31: a read ends there, and 16 n tokens later, for every number of steps."""
        ids, start = [], 0.0
        for number, (token, _) in enumerate(side(max_tokens=skip + tokens)):
            ids.append(token)
            if number == skip - 1:
                start = time.perf_counter()
        return tokens / (time.perf_counter() - start), ids

    def race(self, names: list[str], rounds: int, tokens: int) -> None:
        self.rates = {name: [] for name in names}
        peaks, wrong = dict.fromkeys(names, 0), set()
        for turn in range(rounds + 1):
            for name, side in self.all(names).items():
                mx.reset_peak_memory()
                rate, ids = self.rate(side, tokens)
                peaks[name] = max(peaks[name], mx.get_peak_memory())
                self.expected = self.expected or ids
                if ids != self.expected:
                    wrong.add(name)
                    self.wrong = True
                if turn:  # the first round warms up
                    self.rates[name].append(rate)
        base = self.rates[names[0]]
        for name in names:
            rates = self.rates[name]
            ratio = statistics.median(one / other for one, other in zip(rates, base, strict=True))
            print(
                f"  {name:<20} x{ratio:.3f}  tok/s {statistics.median(rates):7.1f}, best {max(rates):7.1f}  "
                f"peak {peaks[name] / 1e9:.3f} GB  {'TOKENS DIFFER' if name in wrong else 'tokens equal'}",
                flush=True,
            )

    def answers(self, names: list[str], rounds: int, length: int) -> None:
        times: dict[str, list[float]] = {name: [] for name in names}
        first: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, side in self.all(names).items():
                mx.synchronize()
                start = time.perf_counter()
                with closing(side(max_tokens=-1)) as tokens:
                    next(tokens)
                    first[name].append(time.perf_counter() - start)
                    list(islice(tokens, length - 1))
                mx.eval(mx.zeros(1))
                times[name].append(time.perf_counter() - start)
        for name in names:
            middle, lead = (1e3 * statistics.median(one[name]) for one in (times, first))
            print(f"  {name:<20} {middle:8.1f} ms, the first token after {lead:7.1f} ms", flush=True)

    def equal(self, names: list[str], tokens: int) -> None:
        """Equal tokens, log-probabilities and random keys; if sampled, caches after stopping in the middle too."""
        kinds: dict[str, dict[str, Any]] = {
            "top-p, min-p, top-k": {"sampler": make_sampler(temp=0.8, top_p=0.9, min_p=0.02, top_k=50)},
            "greedy": {},
            "repetition": {"logits_processors": make_logits_processors(repetition_penalty=1.2)},
        }
        for kind, how in kinds.items():
            runs = [self.run(name, tokens, how) for name in ("mlx-lm", *names)]
            for name, run in zip(names, runs[1:], strict=True):
                departs = _departure(run, runs[0])
                self.wrong = self.wrong or bool(departs)
                equal = f"tokens, {len(run[1])} arrays and the random key equal"
                print(f"  {kind:<20} {name:<20} {departs or equal}", flush=True)

    def run(self, name: str, tokens: int, how: dict[str, Any]) -> tuple[list[int], list[mx.array], list[mx.array]]:
        mx.random.seed(11)
        caches: list[Any] = []
        if how.get("sampler"):
            how = how | {"prompt_cache": (self.oracle if name == "mlx-lm" else self.model).make_cache()}
            caches = how["prompt_cache"]
        with closing(self.side(name)(max_tokens=-1, **how)) as pairs:
            found = list(islice(pairs, tokens))
        rows = [array for cache in caches for array in cache.keys_and_values()]
        return [token for token, _ in found], [*(one for _, one in found), *rows], [mx.random.state[0]]


def _served(model: Any, prompt: list[int], max_tokens: int) -> Iterator[tuple[int, mx.array]]:
    batch = BatchGenerator(model)
    try:
        batch.insert([prompt], [max_tokens])
        while responses := batch.next_generated():
            yield from ((response.token, response.logprobs) for response in responses)
    finally:
        batch.close()


def _departure(found: Any, expected: Any) -> str:
    if found[0] != expected[0]:
        return "TOKENS DIFFER"
    for what, mine, theirs in (("ARRAYS", found[1], expected[1]), ("KEYS", found[2], expected[2])):
        pairs = list(zip(mine, theirs, strict=True))
        bad = [
            index for index, (one, other) in enumerate(pairs) if not same_bits(mx.contiguous(one), mx.contiguous(other))
        ]
        if bad:
            return f"{what} DIFFER: {len(bad)} of {len(pairs)}, first {bad[0]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--reduced", action="store_true", default=None, help="toy widths")
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="MLX's operations alone")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=48, help="timed in each round, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--answer", type=int, default=50)
    parser.add_argument(
        "--parts", default="inline,overlap,served,answer,equal", help="which, in order (default: %(default)s)"
    )
    parser.add_argument("--commit", help="what to call the commit where there is no git")
    options = parser.parse_args()
    if options.tokens % 16:
        parser.error("--tokens must be a multiple of 16")
    # A fault in a thread of MLX's would end the process without a word, a deadlock would not end it at all.
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    print("\n".join(f"{key:<12} {value}" for key, value in describe(options.commit).items()))
    sides = Sides(options)
    inline = ["mlx-lm", "mlx-lm's loop", *(f"steps {steps}" for steps in (1, 4, 8, 16))]
    overlap = ["mlx-lm's loop", "steps 8", *(f"steps {steps} overlapped" for steps in (1, 4, 8))]
    parts: dict[str, Callable[[], None]] = {
        "equal": lambda: sides.equal(["steps 8", "steps 8 overlapped"], 40),
        "inline": lambda: sides.race(inline, options.rounds, options.tokens),
        "overlap": lambda: sides.race(overlap, options.rounds, options.tokens),
        "served": lambda: sides.race(["mlx-lm: BatchGenerator", "BatchGenerator"], options.rounds, options.tokens),
        "answer": lambda: sides.answers(
            ["mlx-lm's loop", "steps 1", "steps 8", "steps 16", "steps 1 overlapped", "steps 8 overlapped"],
            options.rounds,
            options.answer,
        ),
    }
    for part in options.parts.split(","):
        started = time.perf_counter()
        print(f"{part}:", flush=True)
        try:
            parts[part]()
        except Exception:
            sides.wrong = True
            traceback.print_exc(file=sys.stdout)
        print(f"  ({time.perf_counter() - started:.1f} s)", flush=True)
    return int(sides.wrong)


if __name__ == "__main__":
    sys.exit(main())
