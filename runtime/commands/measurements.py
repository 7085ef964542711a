"""Measurements as they are made, one JSON line each, so that a killed run goes on where it was."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..atomic import write_text
from ..errors import StraightlineError


class Measurements:
    """`path`: a line with the key (whose measurements these are), then one for each {sequence, tokens, what, kl}.

    A sequence is known by its tokens, so measurements of other data may stand in the same file.
    """

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        """Goes on from what is there. Raises StraightlineError if it belongs to another model or setting."""
        self.path = path
        self.found: dict[tuple[str, str], float] = {}
        lines = [json.dumps(key)]
        for entry in read_measurements(path, key) if path.exists() else ():
            if _whole(entry):
                self.found[entry["sequence"], entry["what"]] = entry["kl"]
                lines.append(json.dumps(entry))
        # Half a line, from a run that was killed, goes.
        write_text(path, "\n".join(lines) + "\n")

    def add(self, tokens: Sequence[int], what: str, kl: float) -> None:
        """kl: nats, summed over the tokens. Raises OSError."""
        sequence = _name(tokens)
        self.found[sequence, what] = kl
        line = json.dumps({"sequence": sequence, "tokens": len(tokens), "what": what, "kl": kl}) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(self.path)  # a full disk does not say which
            raise

    def has(self, tokens: Sequence[int], what: str) -> bool:
        return (_name(tokens), what) in self.found

    def mean(self, sequences: Sequence[Sequence[int]], what: str) -> float:
        """Nats a token, over these sequences, each of which has been measured."""
        return sum(self.found[_name(tokens), what] for tokens in sequences) / sum(map(len, sequences))


def measurements_path(out: Path) -> Path:
    return out.with_name(out.name + ".measurements.jsonl")


def read_measurements(path: Path, key: dict[str, Any]) -> list[Any]:
    """Lines as JSON has them, or None. Raises StraightlineError if a part of this key is another there."""
    head, *lines = path.read_bytes().split(b"\n")
    before = _parsed(head)
    if head and not (isinstance(before, dict) and key.keys() <= before.keys()):
        raise StraightlineError(
            f"{path.name}: does not begin as measurements do; remove the file, or choose another --out"
        )
    for name, value in key.items() if head else ():
        if before[name] != value:
            raise StraightlineError(
                f"{path.name}: was measured with {name} {before[name]!r}, not {value!r}; "
                "go on with the same, remove the file, or choose another --out"
            )
    return [_parsed(line) for line in lines]


def _name(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def _parsed(line: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _whole(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("sequence"), str)
        and isinstance(entry.get("what"), str)
        and isinstance(entry.get("kl"), float)
        and math.isfinite(entry["kl"])
        and entry["kl"] >= 0
    )
