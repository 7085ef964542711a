"""KL divergence of a model's output with quantized K/V from that with plain K/V, on given tokens.

Teacher-forced, in chunks; the caches are quantized throughout, from the first token, as they would be in use.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..kv import make_cache


class Reference:
    """The plain logits of one sequence, kept in the model's dtype: tokens times vocabulary."""

    def __init__(self, model: Any, tokens: list[int], chunk: int) -> None:
        self.model, self.tokens, self.chunk = model, tokens, chunk
        self.logits = list(self._logits(None))

    def divergence(self, kv_config: list[dict[str, int]]) -> float:
        """The sum over all positions of KL(plain, quantized), in nats."""
        pairs = zip(self.logits, self._logits(kv_config), strict=True)
        return sum(divergence(plain, logits) for plain, logits in pairs)

    def _logits(self, kv_config: list[dict[str, int]] | None) -> Iterator[mx.array]:
        caches = make_cache(self.model, kv_config)
        for at in range(0, len(self.tokens), self.chunk):
            logits = self.model(mx.array([self.tokens[at : at + self.chunk]]), cache=caches)
            mx.eval(logits, [one.state for one in caches])
            yield logits
        mx.clear_cache()


def divergence(plain: mx.array, other: mx.array) -> float:
    """The sum over the rows of KL(plain, other), in nats. Logits of any float dtype.

    log(sum p exp(d)) for d the difference of the logits less its mean under p: no term is below zero, so a small
    divergence keeps its digits, which that of two log-probabilities in float32 does not.
    """
    before = plain.astype(mx.float32)
    d = other.astype(mx.float32) - before
    p = mx.softmax(before, axis=-1)
    d = d - (p * d).sum(axis=-1, keepdims=True)
    total: Any = mx.log1p((p * mx.maximum(mx.expm1(d) - d, 0)).sum(axis=-1)).sum().item()
    return float(total)
