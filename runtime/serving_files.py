"""Which generated files serve an architecture: one that is given, those of the package, or one of the user's own."""

from types import ModuleType

from ..codegen.spec import Spec
from .drift import changed_upstream
from .errors import StraightlineError
from .registry import find_generated
from .user_files import find_user_file, make_user_file


def choose_files(spec: Spec, file: ModuleType | None, generate: bool) -> tuple[ModuleType, ...]:
    """The modules of this architecture: `file` if it is, else those found or made. Raises StraightlineError."""
    if file is not None:
        if spec.architecture != file.ARCHITECTURE:
            raise StraightlineError(
                f"the file is made for the fingerprint {file.ARCHITECTURE}, but the model has {spec.architecture}"
            )
        return (file,)
    found = find_generated(spec.architecture)
    if found:
        return found
    kept = find_user_file(spec, generate)
    if kept is None and generate:
        kept = make_user_file(spec)
    if kept is None:
        raise StraightlineError(
            f"no generated file has the fingerprint {spec.architecture}; make one with specialize(model, generate=True)"
        )
    return (kept,)


def unserved(spec: Spec) -> str:
    """Why no file would serve a model of this architecture, without the model; "" if one would."""
    try:
        choose_files(spec, None, False)
    except StraightlineError as error:
        return str(error)
    return changed_upstream()
