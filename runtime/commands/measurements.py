"""Measurements as they are made, one JSON line each, so that a killed run goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any

from ..atomic import write_text
from ..errors import StraightlineError


class Measurements:
    """`path`: a line with the key (whose measurements these are), then one for each {sequence, what, kl, tokens}."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        """Goes on from what is there. Raises StraightlineError if it belongs to another model, data or setting."""
        self.path = path
        self.found: dict[tuple[int, str], tuple[float, int]] = {}
        lines = [json.dumps(key)]
        for entry in read_measurements(path, key):
            self.found[entry["sequence"], entry["what"]] = (entry["kl"], entry["tokens"])
            lines.append(json.dumps(entry))
        # Half a line at the end, from a run that was killed, goes.
        write_text(path, "\n".join(lines) + "\n")

    def add(self, sequence: int, what: str, kl: float, tokens: int) -> None:
        self.found[sequence, what] = (kl, tokens)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"sequence": sequence, "what": what, "kl": kl, "tokens": tokens}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def has(self, sequence: int, what: str) -> bool:
        return (sequence, what) in self.found

    def mean(self, what: str) -> float:
        """Nats a token, over all sequences."""
        found = [value for (_, one), value in self.found.items() if one == what]
        return sum(kl for kl, _ in found) / sum(tokens for _, tokens in found)


def measurements_path(out: Path) -> Path:
    return out.with_name(out.name + ".measurements.jsonl")


def read_measurements(path: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that are there already. Raises StraightlineError if one part of this key is another there."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    before = entries[0] if entries else {}
    for name, value in key.items():
        if entries and before.get(name) != value:
            raise StraightlineError(
                f"{path.name}: was measured with {name} {before.get(name)!r}, not {value!r}; "
                "go on with the same, remove the file, or choose another --out"
            )
    return entries[1:]
