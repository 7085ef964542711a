"""The one exception of the code generator, and how it shows a value that came from a stranger."""

import json


class SpecError(Exception):
    """A config, spec, checkpoint or template that cannot be used; the message says where, what, and what instead."""


def show(value: object, limit: int = 48) -> str:
    """A value on one line of at most `limit` characters, as JSON spells it, safe to print whatever it holds."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[: limit + 1]
    text = json.dumps(value, default=lambda other: f"<{type(other).__name__}>")
    return text if len(text) <= limit else text[: limit - 4] + '..."'


def listing(names: list[str], most: int = 6, count: int | None = None) -> str:
    """Names in one sentence: `a`, `a and b`, `a, b and c`, `a, b and 9 more` (of `count`, if not all are given)."""
    count = len(names) if count is None else count
    names = [name if len(name) <= 60 else name[:57] + "..." for name in names[:most]]
    if count > most:
        return f"{', '.join(names)} and {count - most} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
