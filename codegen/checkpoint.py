"""The tensors of a checkpoint's folder: names and shapes. Reads headers, never weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from .config import read_file
from .errors import SpecError, listing, show

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SHARDS = "model*.safetensors"  # the files that mlx-lm loads
POINTER = b"version https://git-lfs"

Shape = tuple[int, ...]
Tensors = Mapping[str, Shape | None]  # None: only an index names the tensor


def read_tensors(folder: Path) -> Tensors:
    """Shard headers tell; an index without its shards tells the names only, as in a partly downloaded checkpoint."""
    shards = sorted(folder.glob(SHARDS))
    index = folder / INDEX
    if not shards and not index.exists():
        raise SpecError(f"{folder}: has neither {SHARDS} nor {INDEX}; expected the weights beside {CONFIG}")
    tensors: dict[str, Shape | None] = dict(_indexed(index, {path.name for path in shards}) if index.exists() else {})
    for path in shards:
        for name, shape in _header(path).items():
            if tensors.get(name, shape) not in (shape, None):
                raise SpecError(
                    f"{path.name}: {show(name, 60)} is {list(shape)}, in another file {list(tensors[name] or ())}; "
                    "expected it once"
                )
            tensors[name] = shape
    return tensors


def refuse_special(path: Path) -> None:
    """Raises SpecError for a pipe or a device, which may never end, or never begin, and for a Git LFS pointer."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise SpecError(f"{path.name}: is a pipe or a device; expected a safetensors file")
    refuse_pointer(path)


def refuse_pointer(path: Path) -> None:
    """Raises SpecError for what `git clone` leaves in the place of a large file where Git LFS is not installed."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise SpecError(f"{path.name}: is a Git LFS pointer; expected the file itself: git lfs pull")


def absent_shards(folder: Path) -> str:
    """A sentence about the files that the index names and the folder lacks; empty if it has them, or no good index."""
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # mlx-lm does without an index too
    here = {path.name for path in folder.iterdir()}
    absent = sorted(show(name)[1:-1] for name in names if isinstance(name, str) and name not in here)
    verb = "is" if len(absent) == 1 else "are"
    return f"{listing(absent)} {verb} absent; expected every file that {INDEX} names" if absent else ""


def _indexed(path: Path, present: set[str]) -> dict[str, None]:
    """The names that the index puts into shards that are not here."""
    names = read_file(path, "an index of safetensors files").get("weight_map")
    if not isinstance(names, dict):
        raise SpecError(f"{path.name}: weight_map is {show(names)}; expected an object of tensor names and file names")
    for name, shard in names.items():
        if not isinstance(shard, str):
            raise SpecError(f"{path.name}: weight_map has {show(shard)} for {show(name)}; expected a file name")
    return {name: None for name, shard in names.items() if shard not in present}


def _header(path: Path) -> dict[str, Shape]:
    from safetensors import SafetensorError, safe_open

    refuse_special(path)
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise SpecError(f"{path.name}: cannot be read ({error}); expected a safetensors file") from None
