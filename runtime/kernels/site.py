"""What every fused site is: sizes baked in, a plain form in MLX's own ops, a kernel as text, inputs for its check."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import mlx.core as mx

from .program import Program

Outputs = mx.array | tuple[mx.array, ...]
Call = Callable[..., Any]
Kernel = Callable[..., list[mx.array]]


class Site(ABC):
    """One token a row. The call of a site takes what `plain` takes and returns what it returns."""

    seeds: ClassVar[int] = 24  # of the self-check
    one_row: ClassVar[bool] = False  # has no kernel for more than one row

    @property
    @abstractmethod
    def unit(self) -> int:
        """How many values of the first input belong to one row of the batch."""

    @abstractmethod
    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the outputs for this many rows."""

    def shapes_of_block(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        """The same for the tokens of a block, [batch, length, ...], each of which is a row."""
        return tuple((batch, length, *shape[2:]) for shape in self.shapes(1))

    def dtypes(self, dtype: mx.Dtype) -> tuple[mx.Dtype, ...]:
        """Those of the outputs, for a stream of this dtype."""
        return (dtype,) * len(self.shapes(1))

    @abstractmethod
    def plain(self, *inputs: Any) -> Outputs:
        """mlx-lm's own operations in their order."""

    @abstractmethod
    def inputs(self, seed: int, rows: int = 1, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, ...]:
        """Random inputs for `plain`, at the real sizes."""

    @abstractmethod
    def program(self, backend: str) -> Program:
        """The kernel for "cuda" or "metal". Raises Unsupported."""

    def form(self, backend: str) -> Call | None:
        """MLX operations that may stand for `plain` on this backend where they are exact; None: only a kernel may."""
        return None

    def launched(self, program: Program, kernel: Kernel, dtype: mx.Dtype) -> Call | None:
        """The call, of a site whose outputs are not of one shape; None: they are those of `shapes`."""
        return None

    def wrap(self, call: Call) -> Call:
        """The call of the site, from one that takes the kernel's inputs, for one row."""
        return call

    def observed(self, call: Call) -> Call:
        """The call as the self-check sees it: everything that it changes is among its results."""
        return call

    def spread(self, inputs: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
        """The kernel's inputs for several rows, from the site's."""
        return inputs


def stands_in(call: Call, site: Site) -> bool:
    """Whether `call` is another than the plain form. Not `call != site.plain`: one of equal sites is asked for all."""
    return getattr(call, "__func__", None) is not type(site).plain


def sites_of(file: ModuleType) -> dict[str, Site]:
    """The fused sites of a generated file, by the names that its `decode` calls them by."""
    return {name.lower(): site for name, site in vars(file).items() if isinstance(site, Site)}
