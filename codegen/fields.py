"""Strict reading of one JSON object: every value is checked, absent keys are named together, left-over keys refused."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import SpecError, listing, show


class Fields:
    """One JSON object of `where` (a file name). Each method takes a key once and returns a checked value."""

    def __init__(self, values: object, where: str, path: str = "", name: str = "the top level") -> None:
        self.name = path.rstrip(".") or name
        if not isinstance(values, Mapping):
            name = path.rstrip(".")
            raise SpecError(
                f"{where}: {name} is {show(values)}; expected an object"
                if name
                else f"{where}: holds {show(values)}; expected an object"
            )
        self.values: Mapping[str, Any] = values
        self.where = where
        self.path = path
        self.taken: set[str] = set()

    def error(self, key: str, expected: str) -> SpecError:
        return SpecError(f"{self.where}: {self.path}{key} is {show(self.values.get(key))}; expected {expected}")

    def require(self, keys: Iterable[str], reason: str) -> None:
        """Refuse if any key is absent, naming every absent one."""
        absent = [self.path + key for key in keys if key not in self.values]
        if absent:
            verb = "is" if len(absent) == 1 else "are"
            raise SpecError(f"{self.where}: {listing(absent, 12)} {verb} absent; expected {reason}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def take(self, key: str) -> Any:
        self.taken.add(key)
        return self.values.get(key)

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.take(key)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """A finite number above `low` and at most `high`, as a float."""
        value = self.take(key)
        if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
            raise self.error(key, f"a number above {low:g} and at most {high:g}")
        if not low < value <= high:
            raise self.error(key, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def word(self, key: str, words: tuple[str, ...]) -> str:
        value = self.take(key)
        if not isinstance(value, str) or value not in words:
            raise self.error(key, " or ".join(f'"{word}"' for word in words))
        return value

    def fixed(self, key: str, *allowed: object) -> None:
        """A key that may be absent, but if there must hold one of the values that mlx-lm's Gemma 4 is made for."""
        if key not in self.values:
            return
        value = self.take(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.error(key, " or ".join(show(one) for one in allowed))

    def finish(self, ignored: Mapping[str, str]) -> None:
        """Refuse what is neither read nor in `ignored` (key to the reason why it cannot change the forward)."""
        left = [key for key in self.values if key not in self.taken and key not in ignored]
        if left:
            names = listing(sorted(map(show, left[:1000])), count=len(left))  # there may be a million
            noun, pronoun = ("this key", "it") if len(left) == 1 else ("these keys", "them")
            raise SpecError(
                f"{self.where}: {self.name} has {names}, unknown to straightline; "
                f"expected a Gemma 4 config (if {noun} cannot change the text forward, remove {pronoun} from the file)"
            )
