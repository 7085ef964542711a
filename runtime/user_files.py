"""Generated files of a user's own architectures, rendered on demand into the user's cache folder and found there again.

Keyed by fingerprint and by what rendered them, so that a new version of straightline renders its own.
"""

import hashlib
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from platformdirs import user_cache_path

from ..codegen.spec import Spec
from .atomic import write_text
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
    """Changes with the version of straightline, and with any template or source of the generator."""
    digest = hashlib.sha256()
    try:
        digest.update(version("straightline").encode())
    except PackageNotFoundError:  # run from a checkout that is not installed
        digest.update(b"checkout")
    package = Path(__file__).parent.parent
    for source in sorted([*(package / "templates").glob("*.j2"), *(package / "codegen").rglob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]


def find_user_file(spec: Spec, again: bool = False) -> ModuleType | None:
    """The file kept for this architecture, if any. Raises StraightlineError if it is damaged.

    again: a damaged file is as good as none, since it is about to be made again.
    """
    path = user_file(spec)
    try:
        if not path.is_file():
            return None
        module = load_generated(path)
        if spec.fingerprint != module.FINGERPRINT:
            raise StraightlineError(f"{path} is made for {module.FINGERPRINT}; expected {spec.fingerprint}")
    except (StraightlineError, OSError) as error:
        if again:
            return None
        raise StraightlineError(f"{error}; specialize(model, generate=True) makes it again") from None
    return module


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
        write_text(path, source)
    except OSError as error:
        raise StraightlineError(
            f"{path.parent}: cannot be written ({error.strerror}); set STRAIGHTLINE_CACHE to a folder that can"
        ) from None
    return load_generated(path)
