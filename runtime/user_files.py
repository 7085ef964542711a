"""Generated files of a user's own architectures, rendered on demand into the user's cache folder and found there again.

Keyed by fingerprint and by what rendered them, so that a new version of straightline renders its own.
"""

import hashlib
import os
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from platformdirs import user_cache_path

from ..codegen.spec import Spec
from .errors import StraightlineError
from .registry import load_generated


def cache_folder() -> Path:
    """STRAIGHTLINE_CACHE, or the platform's cache folder for straightline."""
    chosen = os.environ.get("STRAIGHTLINE_CACHE")
    return Path(chosen) if chosen else user_cache_path("straightline")


def user_file(spec: Spec) -> Path:
    """Where the file for this architecture is kept, whether it is there or not."""
    return cache_folder() / "generated" / f"gemma4_{spec.fingerprint}_{_renderer()}.py"


@cache
def _renderer() -> str:
    """Changes with the version of straightline and with any template."""
    digest = hashlib.sha256()
    try:
        digest.update(version("straightline").encode())
    except PackageNotFoundError:  # run from a checkout that is not installed
        digest.update(b"checkout")
    for template in sorted((Path(__file__).parent.parent / "templates").glob("*.j2")):
        digest.update(template.read_bytes())
    return digest.hexdigest()[:8]


def find_user_file(spec: Spec) -> ModuleType | None:
    path = user_file(spec)
    return load_generated(path) if path.is_file() else None


def make_user_file(spec: Spec) -> ModuleType:
    """Render, verify and keep the file for this architecture. Safe when two processes do it at once.

    Needs the `codegen` extra. Raises StraightlineError if it is not installed or the folder cannot be written.
    """
    try:
        from ..codegen.pipeline import source_of
        from ..codegen.target import spec_target
    except ModuleNotFoundError as error:
        raise StraightlineError(
            f"generate=True needs {error.name}; install it with: pip install 'straightline[codegen]'"
        ) from None
    source = source_of(spec_target(spec, f"gemma4-{spec.fingerprint}"))
    path = user_file(spec)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(source)
        os.replace(file.name, path)
    except OSError as error:
        raise StraightlineError(
            f"{path.parent}: cannot be written ({error.strerror}); set STRAIGHTLINE_CACHE to a folder that can"
        ) from None
    return load_generated(path)
