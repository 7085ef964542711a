"""config.json to a straight-line MLX forward: `generate`. Importing this loads none of the tools that it runs."""

from typing import Any

from .errors import SpecError

__all__ = ["SpecError", "generate"]


def generate(config: dict[str, Any], name: str, *, kv_config: list[dict[str, int]] | None = None) -> str:
    """The Python source of the forward for one Gemma 4 architecture.

    config: a parsed config.json, nested (`gemma4`, `gemma4_unified`) or flat (`gemma4_text`).
    name: what to call it, lower-case words joined by hyphens, e.g. "my-gemma".
    kv_config: a parsed kv_config.json, `[{"layer_idx", "bits", "group_size"}, ...]`, for quantized KV caches. Layers
        left out, and layers of 0 bits, store K/V as they are.

    Pure: writes nothing. The same config and name give the same bytes. Needs the `codegen` extra.
    Raises SpecError, saying where, what, and what instead.
    """
    from .pipeline import source_of
    from .target import checkpoint_target

    return source_of(checkpoint_target(config, name, kv_config))
