"""Which MLX and mlx-lm this version of straightline is made for; anything else is refused at import."""

from importlib.metadata import PackageNotFoundError, version

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
