"""The fast tier next to the exact one: how far each is from mlx-lm's own code in float32, and each attention by itself.

The float32 reference is mlx-lm's model over the same packed weights, everything else in float32 (activations, K/V, all
sums), one token at a time, so that no product is a matrix product that a GPU may take for TF32. float64 is to be had on
a CPU only, and not for a whole model in reasonable time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils

from ..kernels import Attention, Call, FastAttention, sites_of
from ..kernels.fast_check import BOUND, error_of, reference
from ..model import specialize
from ..taps import no_tap
from ..tier import TIERS

LONGEST = 300
KL_FACTOR = 2.0  # of the exact tier's mean; random weights make it a noisy figure
KL_FLOOR = 1e-6
# What a checkpoint is asked to go on with.
TEXTS = (
    "The three laws of motion say that a body",
    "def fibonacci(n):\n    ",
    "Es war einmal ein König, der hatte drei Töchter; die jüngste aber war so schön,",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long is the journey?\nAnswer:",
)


@dataclass
class Tier:
    """One tier against the reference, over all steps."""

    name: str
    apart: list[float]  # KL divergence, reference to tier, nats
    agreed: int = 0

    @property
    def mean(self) -> float:
        return sum(self.apart) / len(self.apart)

    @property
    def most(self) -> float:
        return max(self.apart)


@dataclass
class SiteErrors:
    """One attention of `decode` on the model's own q, k and v: relative to the true result, for each tier."""

    name: str
    exact: list[float]
    fast: list[float]


class Measured:
    """tiers, sites: the figures. prompts, steps: what they are of. states: the fast model's tier_sites."""

    def __init__(self, proof: Any, steps: int, seed: int, kernels: bool | None, folder: Path | None) -> None:
        self.steps = steps
        self.models = {tier: specialize(proof.model, strict=True, kernels=kernels, tier=tier) for tier in TIERS}
        self.states: dict[str, tuple[str, str]] = self.models["fast"].dispatch.tier_sites
        self.prompts, self.of = _prompts(proof, seed, folder)
        self.tiers = {name: Tier(name, []) for name in TIERS}
        self.sites: dict[str, SiteErrors] = {}
        self._reference = in_float32(proof.oracle)

    @property
    def count(self) -> int:
        return len(self.prompts)

    def run(self) -> Iterator[None]:
        """One prompt after the other."""
        for prompt in self.prompts:
            self._prompt(prompt)
            yield

    def _prompt(self, prompt: mx.array) -> None:
        """The exact tier chooses the tokens, as in `generate`; all sides are given the same ones."""
        truth = self._reference.make_cache()
        caches = {name: model.make_cache() for name, model in self.models.items()}
        for index in range(prompt.shape[1]):
            mx.eval(self._reference(prompt[:, index : index + 1], cache=truth))
        for name, model in self.models.items():
            logits = model(prompt, cache=caches[name])
            mx.eval(logits)
            if name == "exact":
                token = _greedy(logits)
        watch = self._watch()
        for _ in range(self.steps):
            expected = _logs(self._reference(token, cache=truth))
            following = token
            for name, model in self.models.items():
                decode = watch if name == "fast" and watch is not None else model
                logits = decode(token, cache=caches[name])
                found, tier = _logs(logits), self.tiers[name]
                tier.apart.append(_apart(expected, found))
                tier.agreed += int(mx.argmax(expected).item() == mx.argmax(found).item())
                if name == "exact":
                    following = _greedy(logits)
            token = following

    def _watch(self) -> Any:
        """The fast model's `decode`, each attention measured as it runs; None if single tokens take `forward`."""
        bound, exact = self.models["fast"]._bound, self.models["exact"]._bound
        route, other = bound.routes[0], exact.routes[0]
        if route.decode is None:
            return None
        calls = dict(vars(route.sites))
        for name, site in sites_of(bound.files[0]).items():
            if isinstance(site, Attention):
                errors = self.sites.setdefault(name, SiteErrors(name, [], []))
                calls[name] = _watched(site, calls[name], getattr(other.sites, name), errors)
        sites = SimpleNamespace(**calls)
        return lambda token, cache: route.decode(bound.weights.single, sites, token, cache, no_tap)

    def refused(self) -> str:
        """Why the fast tier is outside its bound; empty if it is not."""
        for site in self.sites.values():
            running = self.states.get(site.name, ("exact", ""))[0] == "fast"
            above = [error for error in site.fast if not error <= BOUND]
            if running and above:
                return f"{site.name} has an error of {max(above):.1e}, above the bound {BOUND:.1e}"
        exact, fast = (self.tiers[name].mean for name in TIERS)
        if not fast <= KL_FACTOR * exact + KL_FLOOR:
            return f"its mean KL is {fast:.1e}, above {KL_FACTOR:.0f} times that of the exact tier, {exact:.1e}"
        return ""


def in_float32(value: Any) -> Any:
    """A twin of mlx-lm's model: floating arrays in float32, packed weights and everything else shared."""
    if isinstance(value, mx.array):
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    if isinstance(value, nn.Module):
        kind: Any = type(value)
        twin = kind.__new__(kind)
        twin.__dict__.update(value.__dict__)
        dict.update(twin, {key: in_float32(one) for key, one in value.items()})
        return twin
    if isinstance(value, list):
        return [in_float32(one) for one in value]
    if type(value) is dict:
        return {key: in_float32(one) for key, one in value.items()}
    return value


def _prompts(proof: Any, seed: int, folder: Path | None) -> tuple[list[mx.array], str]:
    """Texts for a checkpoint with a tokenizer; else random tokens, within the window and past it."""
    if folder is not None:
        try:
            tokenizer = utils.load_tokenizer(folder)
            encoded = [tokenizer.encode(text) for text in TEXTS]
            if max(map(max, encoded)) < proof.vocabulary:
                return [mx.array([ids]) for ids in encoded], f"{len(TEXTS)} texts, continued greedily"
        except Exception:  # no tokenizer that transformers can read: random tokens do
            pass
    lengths = [min(LONGEST, length) for length in (proof.window // 4 + 1, proof.window + 3)]
    keys = mx.random.split(mx.random.key(seed), len(lengths))
    prompts = [
        mx.random.randint(0, proof.vocabulary, (1, length), key=key) for length, key in zip(lengths, keys, strict=True)
    ]
    return prompts, f"random tokens ({' and '.join(map(str, lengths))}), continued greedily"


def _watched(site: Attention, fast: Call, exact: Call, errors: SiteErrors) -> Call:
    whole = FastAttention(site.heads, site.kv_heads, site.head_dim)

    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        truth, other = reference(whole, q, k, v), exact(q, k, v)
        found: mx.array = fast(q, k, v)
        errors.fast.append(error_of(found, truth))
        errors.exact.append(error_of(other, truth))
        return found

    return attention


def _greedy(logits: mx.array) -> mx.array:
    token: mx.array = mx.argmax(logits[:, -1, :], axis=-1)[:, None]
    return token


def _apart(expected: mx.array, found: mx.array) -> float:
    """KL divergence of two distributions, from their float32 log-probabilities; each of the terms is 0 or more."""
    p, q = mx.exp(expected), mx.exp(found)
    value: Any = (p * (expected - found) - p + q).sum().item()
    return max(float(value), 0.0)


def _logs(logits: mx.array) -> mx.array:
    """float32 log-probabilities of the last token."""
    last = logits[0, -1].astype(mx.float32)
    logs: mx.array = last - mx.logsumexp(last)
    return logs
