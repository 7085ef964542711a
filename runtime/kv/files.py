"""Prompt caches in files, by mlx-lm's own save and load, with what says whose they are.

mlx-lm's loader reads these files too; what it cannot do is refuse one that belongs to another model.
"""

from pathlib import Path
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from ...codegen.config import read_arguments
from ...codegen.errors import SpecError
from ..errors import StraightlineError
from .device import packing
from .make import make_cache
from .ours import quantizable
from .rollback import DEPTH

KEY = "straightline_fingerprint"


def save_cache(path: str | Path, caches: list[Any], model: Any, metadata: dict[str, str] | None = None) -> None:
    """Write the caches of a model to a .safetensors file that `load_cache` and mlx-lm's load_prompt_cache read."""
    mlx_lm_cache.save_prompt_cache(str(_named(path)), caches, {**(metadata or {}), KEY: _fingerprint(model)})


def load_cache(
    path: str | Path,
    model: Any,
    kv_config: list[dict[str, int]] | None = None,
    rollback: bool = False,
    *,
    depth: int = DEPTH,
) -> list[Any]:
    """The caches in a file, which must be those that `make_cache` with the same arguments would make, filled.

    Files of mlx-lm's save_prompt_cache hold no fingerprint; their caches are compared, one by one, all the same.
    Raises StraightlineError if the file is another model's, or was made with another kv_config, rollback or depth.
    """
    path = _named(path)
    expected = make_cache(model, kv_config, rollback, depth=depth)
    try:
        caches, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
    except Exception as error:
        raise StraightlineError(
            f"{path.name} cannot be loaded ({type(error).__name__}: {error}); expected a file made by save_cache"
        ) from None
    saved, own = metadata.get(KEY), _fingerprint(model)
    if saved not in (None, own):
        raise StraightlineError(
            f"{path.name} holds the caches of a model with the fingerprint {saved}, but this one has {own}; "
            "compute the prompt again with this model"
        )
    if len(caches) != len(expected):
        raise StraightlineError(f"{path.name} holds {len(caches)} caches; expected {len(expected)}, one for each owner")
    for index, (cache, wanted) in enumerate(zip(caches, expected, strict=True)):
        if describe(cache) != describe(wanted):
            raise StraightlineError(
                f"{path.name}: cache {index} is {describe(cache)}; expected {describe(wanted)}, "
                "by the kv_config, rollback and depth that load_cache was called with"
            )
    return quantizable(caches)


def describe(cache: Any) -> str:
    """Class and numbers of a cache, e.g. "QuantizedRingCache(bits=4, group_size=64, max_size=1024)"."""
    bits, group_size = packing(cache)
    packed = {} if bits is None else {"bits": bits, "group_size": group_size}
    sizes = {name: getattr(cache, name) for name in ("max_size", "window", "depth") if hasattr(cache, name)}
    return f"{type(cache).__name__}({', '.join(f'{name}={value}' for name, value in (packed | sizes).items())})"


def _fingerprint(model: Any) -> str:
    try:
        return read_arguments(model.get("language_model", model).args).fingerprint
    except SpecError as error:
        raise StraightlineError(str(error)) from None


def _named(path: str | Path) -> Path:
    """MLX appends the ending where it is missing; here, so does the reader."""
    path = Path(path)
    return path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")
