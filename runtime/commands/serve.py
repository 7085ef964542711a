"""mlx_lm.server on a specialized model. Every flag is mlx-lm's, but for --kv-config, --kernels and --tier."""

from pathlib import Path

from ..errors import StraightlineError
from .loader import Wishes, specialized, split


def run(arguments: list[str]) -> int:
    """Until it is interrupted; then standard error says which path served, how often and why."""
    wishes, rest = split(arguments, "straightline serve")
    _refuse_shared_draft(wishes)
    with specialized("mlx_lm.server", wishes, rest) as program:
        program.main()
    return 0


def _refuse_shared_draft(wishes: Wishes) -> None:
    """mlx-lm's server tells a model's caches from its draft's by the number of layers, but sharing layers have none."""
    if wishes.draft is None or wishes.model is None:
        return
    from ..loading import find_folder
    from .subject import read_folder

    folder: Path = find_folder(wishes.model)
    spec = read_folder(folder, wishes.model).spec
    if len(spec.owners) < len(spec.layers):
        raise StraightlineError(
            f"serve: {wishes.model} shares K/V between layers, and mlx-lm's server cannot tell its caches from those "
            "of a draft model; leave --draft-model out, or use straightline generate"
        )
