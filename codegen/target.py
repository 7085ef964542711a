"""Target: what one file under generated/ is made from. Reads codegen/specs/NAME.toml and the config beside it."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from .config import read_config, read_file, read_json
from .errors import SpecError, show
from .fields import Fields
from .kv import read_kv_config
from .spec import Spec

SPECS = Path(__file__).parent / "specs"
FUSED_SITES = ("scaled_add",)


@dataclass(frozen=True)
class Target:
    """`name` as the user types it (gemma4-12b), `module` as Python does; `source` and `cure` go into the header.

    fused: elementwise sites of `forward`. sites: those of `decode`, as the spec file states them, or None.
    """

    name: str
    spec: Spec
    fused: tuple[str, ...]
    source: str
    cure: str
    sites: tuple[str, ...] | None = None

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


def check_name(name: object) -> str:
    """A name becomes a file name and part of a comment, so only lower-case words joined by hyphens are let through."""
    if not isinstance(name, str) or len(name) > 64 or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise SpecError(f"name is {show(name)}; expected lower-case letters and digits in words joined by -")
    return name


def target_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem.replace("_", "-") for path in SPECS.glob("*.toml")))


def read_target(name: str) -> Target:
    """The committed target called `name`; its spec file is stated and checked against the config beside it."""
    names = target_names()
    if name not in names:
        raise SpecError(f"target {show(name)} is unknown; expected one of {', '.join(names)}")
    path = SPECS / f"{check_name(name).replace('-', '_')}.toml"
    where = path.name
    try:
        stated = Fields(tomllib.loads(path.read_text(encoding="utf-8")), where)
    except (OSError, ValueError) as error:
        raise SpecError(f"{where}: cannot be read ({error}); expected a target's TOML file") from None
    stated.require(["config", "layers", "sentinel", "taps", "fused", "sites"], "each stated")
    config = _beside(stated, "config")
    spec = read_config(read_file(SPECS / config), config)
    if "kv_config" in stated.values:
        kv_config = _beside(stated, "kv_config")
        spec = spec.with_kv(read_kv_config(read_json(SPECS / kv_config), spec, kv_config))
    for key, value in (("layers", len(spec.layers)), ("sentinel", spec.sentinel), ("taps", [-1, spec.sentinel])):
        if stated.take(key) != value:
            raise stated.error(key, f"{value}, from {config}")
    fused = stated.take("fused")
    if not isinstance(fused, list) or any(site not in FUSED_SITES for site in fused) or len(set(fused)) != len(fused):
        raise stated.error("fused", f"a list out of {', '.join(FUSED_SITES)}")
    sites = stated.take("sites")
    if not isinstance(sites, list) or not all(isinstance(site, str) for site in sites):
        raise stated.error("sites", "a list of names")
    stated.finish({})
    cure = f"edit that spec or templates/, then run: ./regen.sh {name}"
    return Target(name, spec, tuple(fused), f"codegen/specs/{path.name}", cure, tuple(sites))


def _beside(stated: Fields, key: str) -> str:
    name = stated.take(key)
    if not isinstance(name, str) or Path(name).name != name:
        raise stated.error(key, "the name of a file beside it")
    return name


def spec_target(spec: Spec, name: str) -> Target:
    """A target for a loaded model, rendered on demand by `specialize(model, generate=True)`."""
    return Target(name, spec, FUSED_SITES, "a loaded model", "delete this file; it is rendered again on demand")


def checkpoint_target(config: object, name: str, kv_config: object = None) -> Target:
    """A target for a user's own config.json (and kv_config.json), with every fused site."""
    name = check_name(name)
    spec = read_config(config)
    if kv_config is not None:
        spec = spec.with_kv(read_kv_config(kv_config, spec))
    cure = f"run: ./regen.sh --from DIR --name {name}"
    return Target(name, spec, FUSED_SITES, "a checkpoint's config.json", cure)
