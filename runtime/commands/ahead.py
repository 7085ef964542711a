"""What config.json and the arguments alone say against a command, asked before minutes go into weights.

Whatever needs the weights is said later, in the same words.
"""

import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from ...codegen.config import read_config, read_file
from ...codegen.errors import SpecError
from ...codegen.kv import read_kv_config, uniform_kv_config
from ...codegen.spec import Spec
from ..errors import StraightlineError
from .prompts import prompts
from .subject import CONFIG, Subject


def stated(folder: Path) -> Spec | None:
    """The Spec of a checkpoint; None where its config is one that mlx-lm may know better how to read."""
    try:
        return read_config(read_file(folder / CONFIG))
    except SpecError:
        return None


def expect_taps(spec: Spec, layers: Iterable[int]) -> None:
    from ..taps import HiddenTap

    HiddenTap(layers).begin(spec.sentinel, 1)


def expect_prompts(path: Path, spec: Spec, count: int | None = None) -> None:
    """All but what only the tokenizer knows, of so many prompts or all."""
    for _ in islice(prompts(path, lambda text: [0], spec.vocab_size), count):
        pass


def expect_kv_bits(spec: Spec, bits: int, group_size: int, where: str) -> None:
    read_kv_config(uniform_kv_config(spec, bits, group_size), spec, where)


def expect_file(subject: Subject, purpose: str) -> None:
    """Raises StraightlineError if no generated file is for this architecture. purpose: "verify" or "time"."""
    from ..serving_files import unserved

    reason = unserved(subject.spec.with_kv(()))
    if reason:
        raise StraightlineError(
            f"{subject.name}: there is nothing to {purpose}: {reason}; straightline explain says which facts differ"
        )


def expect_place(path: Path) -> None:
    """Raises StraightlineError or OSError if no file can be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise StraightlineError(f"{path}: is a folder; expected a file to write")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        error.filename = str(path)
        raise
