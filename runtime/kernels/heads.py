"""What every site of a token's attention is over: query heads, and the KV heads that they share."""

from dataclasses import dataclass
from typing import ClassVar

from .site import Site


@dataclass(frozen=True)
class OverHeads(Site):
    """The first input is q: heads * head_dim values."""

    heads: int
    kv_heads: int
    head_dim: int

    one_row: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        return self.heads * self.head_dim

    @property
    def repeats(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads
