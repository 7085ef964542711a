"""The index beside the shards of `straightline taps`: the settings they were made with, and which are complete."""

import json
from pathlib import Path
from typing import Any

from ...codegen.config import read_file
from ...codegen.errors import show
from ..atomic import write_text
from ..errors import StraightlineError
from .shards import FORMAT, Shard


class TapIndex:
    """Written anew, in one step, after each shard."""

    def __init__(self, out: Path, settings: dict[str, Any], shards: tuple[Shard, ...]) -> None:
        """Goes on from an index that is there. Raises StraightlineError if its settings are others."""
        self.path = index_path(out)
        self.settings = settings
        self.shards = shards
        listed = {entry["file"] for entry in read_index(out, settings).get("shards", ())}
        self.done = {one.name for one in shards if one.name in listed and (out.parent / one.name).is_file()}

    def add(self, shard: Shard) -> None:
        self.done.add(shard.name)
        self.write()

    def write(self) -> None:
        complete = [shard.entry for shard in self.shards if shard.name in self.done]
        found = {
            "format": FORMAT,
            "settings": self.settings,
            "prompts": sum(len(shard.lengths) for shard in self.shards),
            "rows": sum(shard.rows for shard in self.shards),
            "complete": len(complete) == len(self.shards),
            "shards": complete,
        }
        write_text(self.path, json.dumps(found, indent=1) + "\n")


def index_path(out: Path) -> Path:
    return out.with_name(out.name + ".index.json")


def read_index(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The index that is there; {} if none is. Raises StraightlineError if one of these settings is another there."""
    path = index_path(out)
    if not path.exists():
        return {}
    before = read_file(path, "an index of straightline taps")
    if before.get("format") != FORMAT or not isinstance(before.get("settings"), dict):
        raise StraightlineError(f"{path.name}: is no index of this version; expected {FORMAT!r}")
    for key, value in settings.items():
        found = before["settings"].get(key)
        if found != value:
            raise StraightlineError(
                f"{path.name}: was made with {key} {_shown(found)}, not {_shown(value)}; "
                "go on with the same settings, or choose another --out"
            )
    return before


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) and len(value) < 20 else show(value)
