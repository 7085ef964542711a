"""What a rule is: a name, a sentence, and a check that yields each place where a tree breaks it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import libcst as cst

from ..plan import Plan
from .tree import Tree

Place = cst.CSTNode | tuple[int, int]  # a node, or a line from 1 and a column from 0
START: Place = (1, 0)


class Violation(NamedTuple):
    place: Place
    what: str
    expected: str


Violations = Iterator[Violation]


@dataclass(frozen=True)
class Rule:
    name: str
    sentence: str
    check: Callable[[Tree, Plan], Violations]
