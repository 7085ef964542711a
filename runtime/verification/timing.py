"""One token at a time on three sides, each with its own caches: mlx-lm's model, `forward`, and what a call runs."""

import io
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..kernels import report
from ..model import specialize
from ..taps import no_tap

Side = Callable[[mx.array], mx.array]
WARM_UP = 10
SINGLE = 15


class Race:
    """Sides that decode from the same prompt. `compare` first, then `round` as often as wanted, then `results`."""

    def __init__(self, oracle: Any, model: Any, vocabulary: int, context: int, kernels: bool) -> None:
        started = time.perf_counter()
        self.model = specialize(model, strict=True, kernels=kernels)
        seconds = time.perf_counter() - started
        prompt = mx.array([[(7919 * index) % vocabulary for index in range(context)]])
        filled = oracle.make_cache()
        mx.eval(oracle(prompt, cache=filled), [cache.state[:2] for cache in filled])
        bound = self.model._bound
        route = bound.routes[0]
        caches = {name: _copies(filled, self.model.make_cache) for name in ("mlx-lm", "forward", "decode")}
        self.sides: dict[str, Side] = {
            "mlx-lm": lambda ids: oracle(ids, cache=caches["mlx-lm"]),
            "forward": lambda ids: route.forward(bound.weights, ids, caches["forward"], no_tap),
            "decode": lambda ids: self.model(ids, cache=caches["decode"]),
        }
        self.token = mx.array([[23 % vocabulary]])
        self.departs = dict.fromkeys(self.sides, "")
        self.primitives = dict.fromkeys(self.sides, 0)
        self.compared = 0
        self.rates: dict[str, list[float]] = {name: [] for name in self.sides}
        self.peaks = dict.fromkeys(self.sides, 0)
        states = [state for state, _ in report().values()]
        self.facts = {
            "specialize": f"{seconds:.1f} s",
            "one token": self.model.dispatch.decode_reason or "by decode",
            "fused sites": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        }

    def compare(self, steps: int) -> None:
        """Greedy tokens of mlx-lm through all sides; the logits of each step compared as bytes."""
        for step in range(steps):
            logits = {name: side(self.token) for name, side in self.sides.items()}
            if not step:
                self.primitives = {name: count_primitives(one) for name, one in logits.items()}
            mx.eval(list(logits.values()))
            for name, one in logits.items():
                if not self.departs[name] and not _same(one, logits["mlx-lm"]):
                    self.departs[name] = f"step {step}"
            self.token = _greedy(logits["mlx-lm"])
        self.compared = steps
        for side in self.sides.values():
            self._rate(side, WARM_UP)

    def round(self, tokens: int) -> None:
        for name, side in self.sides.items():
            mx.reset_peak_memory()
            self.rates[name].append(self._rate(side, tokens))
            self.peaks[name] = max(self.peaks[name], mx.get_peak_memory())

    def results(self) -> list[dict[str, Any]]:
        base = self.rates["mlx-lm"]
        rows = []
        for name, side in self.sides.items():
            rates = self.rates[name]
            ratios = [one / other for one, other in zip(rates, base, strict=True)]
            q25, median, q75 = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
            build, dispatch, wait = self._parts(side)
            rows.append(
                {
                    "side": name,
                    "departs": self.departs[name],
                    "compared": self.compared,
                    "ratio": median,
                    "ratio_q25": q25,
                    "ratio_q75": q75,
                    "best_over_best": max(rates) / max(base),
                    "median": statistics.median(rates),
                    "best": max(rates),
                    "primitives": self.primitives[name],
                    "build": build,
                    "dispatch": dispatch,
                    "wait": wait,
                    "peak_gb": self.peaks[name] / 1e9,
                }
            )
        return rows

    def _rate(self, side: Side, tokens: int) -> float:
        """Tokens per second of a loop that, like mlx-lm's, asks for the next token before it reads the last."""
        token = _greedy(side(self.token))
        mx.async_eval(token)  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        for _ in range(tokens):
            following = _greedy(side(token))
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            token.item()
            token = following
        return tokens / (time.perf_counter() - started)

    def _parts(self, side: Side) -> tuple[float, float, float]:
        """Median milliseconds of a token: building the graph, dispatching it, waiting for the device."""
        parts = []
        for _ in range(SINGLE):
            start = time.perf_counter()
            logits = side(self.token)
            built = time.perf_counter()
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
            dispatched = time.perf_counter()
            mx.synchronize()
            done = time.perf_counter()
            parts.append((built - start, dispatched - built, done - dispatched))
        build, dispatch, wait = (1e3 * statistics.median(column) for column in zip(*parts, strict=True))
        return build, dispatch, wait


def count_primitives(output: mx.array) -> int:
    """How many primitives the graph of an array that is not evaluated yet asks for."""
    text = io.StringIO()
    mx.export_to_dot(text, output)
    return len(re.findall(r"shape\s*=\s*rectangle", text.getvalue()))


def _copies(caches: list[Any], make: Callable[[], list[Any]]) -> list[Any]:
    copies = make()
    for copy, cache in zip(copies, caches, strict=True):
        copy.state = tuple(mx.contiguous(one) + 0 if isinstance(one, mx.array) else one for one in cache.state)
    mx.eval([[one for one in copy.state if isinstance(one, mx.array)] for copy in copies])
    return copies


def _greedy(logits: mx.array) -> mx.array:
    token: mx.array = mx.argmax(logits[:, -1, :], axis=-1)[:, None]
    return token


def _same(found: mx.array, expected: mx.array) -> bool:
    unsigned = {2: mx.uint16, 4: mx.uint32}[expected.dtype.size]
    return found.dtype == expected.dtype and bool(mx.array_equal(found.view(unsigned), expected.view(unsigned)).item())
