"""PackedRows: keys as a quantized cache stores them, with the attention that reads them so."""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx


class PackedRows(tuple[mx.array, ...]):
    """(packed, scales, biases). attention(q, these, values of the same form) -> [1, 1, heads * head_dim].

    What a generated file hands to `quantized_attention` in the fast tier. site: what the attention is.
    """

    attention: Callable[..., mx.array]
    site: Any

    @classmethod
    def of(cls, rows: Iterable[mx.array], attention: Callable[..., mx.array], site: Any) -> "PackedRows":
        packed = cls(rows)
        packed.attention = attention
        packed.site = site
        return packed
