"""Which MLX and mlx-lm this version of straightline is made for; anything else is refused at import."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

# The same bounds as in pyproject.toml (a test compares them).
SUPPORTED = {"mlx": ">=0.32.4", "mlx-lm": ">=0.32.2,<0.33"}


def check_versions() -> None:
    """Raises ImportError if MLX or mlx-lm is missing or outside the supported range."""
    for package, supported in SUPPORTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(f"{package} is not installed; expected {package}{supported}") from None
        if not SpecifierSet(supported).contains(found, prereleases=True):
            raise ImportError(
                f"{package} is {found}; straightline is made for {package}{supported}: "
                f"pip install '{package}{supported}'"
            )


def refuse_other_versions() -> None:
    """`check_versions` at import. Whoever runs the command reads one sentence, and the exit code is 1."""
    try:
        check_versions()
    except ImportError as error:
        if not _is_the_command():
            raise
        sys.exit(f"error: {error}")


def _is_the_command() -> bool:
    """Whether this process is `straightline` or `python -m straightline.runtime`, on its way to the module to run."""
    program = sys.argv[0] if sys.argv else ""
    return Path(program).stem == "straightline" or (program == "-m" and "straightline.runtime" in sys.orig_argv)
