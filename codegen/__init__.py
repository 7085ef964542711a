"""config.json to a straight-line MLX forward: `generate`. Importing this loads none of the tools that it runs."""

from typing import Any

from .errors import SpecError

__all__ = ["SpecError", "generate"]


def generate(config: dict[str, Any], name: str, *, kv_config: list[dict[str, int]] | None = None) -> str:
    """The Python source of the forward for one Gemma 4 architecture.

    config: a parsed config.json, nested (`gemma4`, `gemma4_unified`) or flat (`gemma4_text`).
    name: what to call it, lower-case words joined by hyphens, e.g. "my-gemma".
    kv_config: quantized KV caches; not supported in this version, so anything but None is refused.

    Pure: writes nothing. The same config and name give the same bytes. Needs the `codegen` extra.
    Raises SpecError, saying where, what, and what instead.
    """
    if kv_config is not None:
        raise SpecError("kv_config: quantized KV caches are not supported in this version; expected None")
    from .pipeline import source_of
    from .target import checkpoint_target

    return source_of(checkpoint_target(config, name))
