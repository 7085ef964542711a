"""The headers of a checkpoint's safetensors files: names, dtypes, shapes, sizes. Reads no weights, loads no MLX."""

import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...codegen.checkpoint import SHARDS, refuse_special
from ...codegen.plan import ranges
from ...codegen.spec import Spec
from ...codegen.tensors import OTHER_TOWERS, canonical, expected_tensors, quantization_modes
from ..errors import StraightlineError
from .words import size

MOST_BYTES = 64 * 1024 * 1024
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U32": "uint32", "U8": "uint8"}


@dataclass(frozen=True)
class Header:
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_headers(folder: Path) -> dict[str, Header]:
    """Tensor name to header, of all shards that are there; empty if none is."""
    return {name: header for path in sorted(folder.glob(SHARDS)) for name, header in _read(path)}


def _read(path: Path) -> Iterator[tuple[str, Header]]:
    refuse_special(path)
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST_BYTES:
                raise ValueError(f"a header of {length} bytes")
            entries: dict[str, Any] = json.loads(file.read(length))
        whole = path.stat().st_size - 8 - length
        for name, entry in entries.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                if end > whole:
                    raise ValueError(f"{whole} bytes of data, but {name[:60]!r} ends at {end}")
                yield name, Header(str(entry["dtype"]), tuple(entry["shape"]), end - start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise StraightlineError(f"{path.name}: cannot be read ({error}); expected a safetensors file") from None


def floating(headers: dict[str, Header]) -> set[str]:
    """The floating dtypes of the text model, as MLX spells them."""
    text = [one for name, one in headers.items() if not name.removeprefix("model.").startswith(OTHER_TOWERS)]
    return {DTYPES[one.dtype] for one in text if one.dtype in ("BF16", "F16", "F32")}


def summary(headers: dict[str, Header], spec: Spec, config: dict[str, Any]) -> list[str]:
    """How the weights of the text model are stored, one line a form, most bytes first; then the total."""
    modes = quantization_modes(config)
    named = {canonical(name): header for name, header in headers.items()}
    bytes_of: Counter[str] = Counter()
    count_of: Counter[str] = Counter()
    parts: dict[str, set[str]] = {}
    layers: dict[str, set[int]] = {}
    for name, tensor in expected_tensors(spec).items():
        header = named.get(name)
        if header is None:
            continue
        module = name.removesuffix(".weight")
        scales = named.get(f"{module}.scales")
        if tensor.quantizable and scales is not None:
            bits = header.shape[-1] * 32 // tensor.shape[-1]
            group = tensor.shape[-1] // scales.shape[-1]
            form = f"{bits}-bit {modes(module) or 'affine'}, groups of {group}"
            beside = (named.get(f"{module}.{part}") for part in ("scales", "biases"))
            bytes_of[form] += sum(one.nbytes for one in beside if one)
        else:
            form = DTYPES.get(header.dtype, header.dtype.lower())
        bytes_of[form] += header.nbytes
        count_of[form] += 1
        place = module.split(".")
        parts.setdefault(form, set()).add(place[-1])
        if place[0] == "layers":
            layers.setdefault(form, set()).add(int(place[1]))
    lines = []
    for form, number in bytes_of.most_common():
        names = sorted(parts[form])
        what = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        where = f" in layers {ranges(sorted(layers[form]))}" if form in layers else ""
        lines.append(f"{form}: {count_of[form]} tensors, {size(number)} ({what}{where})")
    lines.append(f"in all {size(sum(header.nbytes for header in headers.values()))}, other towers included")
    return lines
