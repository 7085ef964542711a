"""What a command is about: a checkpoint's folder, a hub id, or a published target. Loads no weights and no MLX."""

import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...codegen.config import read_config, read_file, read_json
from ...codegen.kv import read_kv_config
from ...codegen.spec import Quantized, Spec
from ...codegen.target import SPECS, Target, read_target, spec_target, target_names
from ..errors import StraightlineError

CONFIG = "config.json"
KV_CONFIG = "kv_config.json"


@dataclass(frozen=True)
class Subject:
    """name: what to call it. folder: of a checkpoint, else None. spec: with K/V stored as kv_config says, if any."""

    name: str
    folder: Path | None
    config: dict[str, Any]
    spec: Spec
    kv_config: list[dict[str, int]] | None

    @property
    def target(self) -> Target:
        """For the pictures and tables of codegen, which are of targets."""
        return spec_target(self.spec, self.name)


def read_subject(text: str) -> Subject:
    """A folder with a config.json, the name of a target, or a hub id whose config.json is then fetched."""
    folder = Path(text).expanduser()
    if (folder / CONFIG).is_file():
        return read_folder(folder, shown(folder.resolve().name))
    if text in target_names():
        return published(text)
    if folder.exists() or text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise StraightlineError(
            f"{text}: is no folder with a {CONFIG}; expected one, a hub id (owner/name), or one of "
            f"{', '.join(target_names())}"
        )
    return read_folder(_fetched(text), text)


def shown(name: str) -> str:
    """A folder's name as it is, or quoted if it holds what would not stay on its line."""
    return name if name.isprintable() else repr(name)


def name_of(where: str, folder: Path) -> str:
    """What to call the checkpoint that was asked for as `where`: a hub id as it is, a folder by its name."""
    return shown(folder.resolve().name) if Path(where).exists() else where


def read_folder(folder: Path, name: str) -> Subject:
    config = read_file(folder / CONFIG)
    spec = read_config(config)
    path = folder / KV_CONFIG
    if not path.is_file():
        return Subject(name, folder, config, spec, None)
    kv_config = read_json(path)
    return Subject(name, folder, config, spec.with_kv(read_kv_config(kv_config, spec)), kv_config)


def published(name: str) -> Subject:
    """A target by its name. Raises SpecError if there is none."""
    spec = read_target(name).spec
    stated = tomllib.loads((SPECS / f"{name.replace('-', '_')}.toml").read_text(encoding="utf-8"))
    kv_config = read_json(SPECS / stated["kv_config"]) if "kv_config" in stated else None
    return Subject(name, None, read_file(SPECS / stated["config"]), spec, kv_config)


def published_kv_config(spec: Spec) -> tuple[str, list[dict[str, int]]] | None:
    """The target of the same architecture whose K/V are quantized, if there is one, and its kv_config."""
    for name in target_names():
        one = published(name)
        if one.kv_config is not None and one.spec.architecture == spec.architecture:
            return name, one.kv_config
    return None


def stored_as(spec: Spec, kv_config: object) -> Spec:
    kv: tuple[Quantized | None, ...] = read_kv_config(kv_config, spec)
    return spec.with_kv(kv)


def _fetched(hub_id: str) -> Path:
    """The hub's folder with config.json and, if it has one, kv_config.json. Weights stay where they are."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        config = Path(hf_hub_download(hub_id, CONFIG))
        with suppress(EntryNotFoundError):
            hf_hub_download(hub_id, KV_CONFIG)
    except Exception as error:  # the hub's client has many, and the network more
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StraightlineError(f"{hub_id}: is no folder here and cannot be had from the hub: {reason}") from None
    return config.parent
