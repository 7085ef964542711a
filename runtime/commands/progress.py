"""Progress bars: on standard error, and only where somebody watches."""

import sys
from typing import Any


def progress(total: int, unit: str, *, quiet: bool = False, initial: int = 0, description: str = "") -> Any:
    """A tqdm bar, off if quiet or if standard error is not a terminal."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        desc=description or None,
        file=sys.stderr,
        disable=quiet or not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=False,
    )
