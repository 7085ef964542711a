"""How a model that is loaded stores K/V: what `load` was told, or the checkpoint's own kv_config.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...codegen.config import read_config, read_file, read_json
from ...codegen.errors import SpecError
from ...codegen.kv import BITS, GROUP_SIZES, read_kv_config, uniform_kv_config
from ...codegen.spec import Spec
from ..errors import StraightlineError

AUTO = "auto"
FILE = "kv_config.json"


def chosen_storage(
    folder: Path, kv_config: Any, kv_bits: int | None, group_size: int, keep_last_full: bool
) -> Spec | None:
    """The checkpoint's Spec with its K/V stored so; None if nothing was asked for, or "auto" finds no file.

    Of a choice that `check_choice` has let through. Reads config.json, so that what does not fit the checkpoint is
    refused before weights are loaded. Raises StraightlineError.
    """
    if kv_bits is None and (kv_config is None or (kv_config == AUTO and not (folder / FILE).is_file())):
        return None
    try:
        spec = read_config(read_file(folder / "config.json"))
        if kv_bits is not None:
            kv_config = uniform_kv_config(spec, kv_bits, group_size, keep_last_full=keep_last_full)
        elif kv_config == AUTO:
            kv_config = read_json(folder / FILE)
        return spec.with_kv(read_kv_config(kv_config, spec, "kv_bits" if kv_bits is not None else FILE))
    except SpecError as error:
        raise StraightlineError(f"{folder}: {error}") from None


def check_choice(kv_config: Any, kv_bits: int | None, group_size: int, keep_last_full: bool) -> None:
    """Raises StraightlineError for what no checkpoint could fit."""
    if isinstance(kv_config, str) and kv_config != AUTO:
        raise StraightlineError(f'kv_config is {kv_config!r}; expected "auto", a list of entries, or None')
    if kv_bits is None:
        if keep_last_full:
            raise StraightlineError("keep_last_full goes with kv_bits; a kv_config says itself what stays plain")
    elif kv_config is not None:
        raise StraightlineError("kv_bits and kv_config are both given; expected one of them only")
    else:
        check_kv_bits(kv_bits, group_size)


def check_kv_bits(kv_bits: int, group_size: int) -> None:
    """Raises StraightlineError unless caches of ours can be stored so."""
    if kv_bits not in BITS or group_size not in GROUP_SIZES:
        raise StraightlineError(
            f"kv_bits is {kv_bits!r} and kv_group_size {group_size!r}; expected one of {_words(BITS)} bits in groups "
            f"of {_words(GROUP_SIZES)}"
        )


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
