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
        return sum(_divergence(plain, logits) for plain, logits in pairs)

    def _logits(self, kv_config: list[dict[str, int]] | None) -> Iterator[mx.array]:
        caches = make_cache(self.model, kv_config)
        for at in range(0, len(self.tokens), self.chunk):
            logits = self.model(mx.array([self.tokens[at : at + self.chunk]]), cache=caches)
            mx.eval(logits, [one.state for one in caches])
            yield logits
        mx.clear_cache()


def _divergence(plain: mx.array, other: mx.array) -> float:
    p, q = (one.astype(mx.float32) for one in (plain, other))
    p, q = (one - mx.logsumexp(one, axis=-1, keepdims=True) for one in (p, q))
    # Rounding may leave a position a little below zero, which no divergence is.
    total: Any = mx.maximum((mx.exp(p) * (p - q)).sum(axis=-1), 0).sum().item()
    return float(total)
