"""Shards of hidden states: planned from the lengths of the prompts, then written row by row into their places.

Every byte of a shard has its place before the first forward, so memory does not grow with it. A shard counts once it
has been renamed and the index lists it; what a killed process leaves is a .part file, which is written over.
"""

import json
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

FORMAT = "straightline taps 1"


@dataclass(frozen=True)
class Shard:
    """Prompts `first` to `first + len(lengths) - 1`, each whole."""

    name: str
    first: int
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def entry(self) -> dict[str, Any]:
        """What the index says of it."""
        return {"file": self.name, "first_prompt": self.first, "prompts": len(self.lengths), "rows": self.rows}


def plan(out: Path, lengths: list[int], row_bytes: int, most_bytes: int) -> tuple[Shard, ...]:
    """Consecutive prompts, as many as fit; a longer prompt has a shard of its own."""
    groups: list[tuple[int, list[int]]] = []
    for index, length in enumerate(lengths):
        if not groups or (sum(groups[-1][1]) + length) * row_bytes > most_bytes:
            groups.append((index, []))
        groups[-1][1].append(length)
    count = len(groups)
    names = [f"{out.stem}-{number + 1:05}-of-{count:05}{out.suffix}" for number in range(count)]
    names = names if count > 1 else [out.name]
    return tuple(Shard(name, first, tuple(group)) for name, (first, group) in zip(names, groups, strict=True))


@dataclass(frozen=True)
class Layout:
    """What every shard of a run holds: `hidden.N` for each layer N, each row `width` numbers of `dtype`."""

    layers: tuple[int, ...]
    width: int
    dtype: str  # as safetensors spells it
    itemsize: int

    @property
    def row_bytes(self) -> int:
        return len(self.layers) * self.width * self.itemsize + 4

    def tensors(self, shard: Shard) -> Iterator[tuple[str, str, list[int], int]]:
        """Name, dtype, shape and bytes, in the order of the file. Numbers of 8 bytes first, so that all are aligned."""
        yield "offsets", "I64", [len(shard.lengths) + 1], 8 * (len(shard.lengths) + 1)
        yield "tokens", "I32", [shard.rows], 4 * shard.rows
        for layer in self.layers:
            yield f"hidden.{layer}", self.dtype, [shard.rows, self.width], shard.rows * self.width * self.itemsize


class ShardFile:
    """One shard while it is written."""

    def __init__(self, folder: Path, shard: Shard, layout: Layout, metadata: dict[str, str]) -> None:
        self.shard, self.layout = shard, layout
        self.path = folder / shard.name
        self.part = folder / f"{shard.name}.part"
        head: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        self.places: dict[str, int] = {}
        for name, dtype, shape, nbytes in layout.tensors(shard):
            head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            self.places[name] = end
            end += nbytes
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self.places = {name: start + place for name, place in self.places.items()}
        self.file: BinaryIO = self.part.open("wb")
        self.file.write(struct.pack("<Q", len(text)) + text)
        self.file.truncate(start + end)

    def write_tokens(self, prompts: list["array[int]"]) -> None:
        offsets = array("q", [0])
        for tokens in prompts:
            offsets.append(offsets[-1] + len(tokens))
        self._write(self.places["offsets"], offsets.tobytes())
        self._write(self.places["tokens"], b"".join(tokens.tobytes() for tokens in prompts))

    def write_rows(self, layer: int, row: int, rows: bytes) -> None:
        """row: the first of them, counted from the start of the shard."""
        self._write(self.places[f"hidden.{layer}"] + row * self.layout.width * self.layout.itemsize, rows)

    def _write(self, place: int, data: bytes) -> None:
        try:
            self.file.seek(place)
            self.file.write(data)
        except OSError as error:
            error.filename = str(self.part)  # a full disk does not say which
            raise

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.path)
