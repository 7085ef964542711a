"""Generated files read as text: their fingerprints, in the package and in the user's cache folder. Loads no MLX."""

import re
from dataclasses import dataclass
from pathlib import Path

from ...codegen.spec import Spec
from ..user_files import user_file

GENERATED = Path(__file__).parents[2] / "generated"
DATA = re.compile(r'^(FINGERPRINT|ARCHITECTURE) = "([0-9a-f]{16})"$', re.MULTILINE)


@dataclass(frozen=True)
class GeneratedFile:
    """where: "package" or "user" (the cache folder)."""

    name: str
    path: Path
    where: str
    fingerprint: str
    architecture: str

    @property
    def quantized(self) -> bool:
        return self.fingerprint != self.architecture


def packaged_files() -> tuple[GeneratedFile, ...]:
    """The files of straightline.generated, by name."""
    found = (read_header(path, "package") for path in sorted(GENERATED.glob("*.py")))
    return tuple(one for one in found if one)


def files_for(spec: Spec) -> tuple[GeneratedFile, ...]:
    """Those of this architecture: the one for plain caches first, as the runtime looks for them."""
    found = [one for one in packaged_files() if one.architecture == spec.architecture]
    if not found:
        kept = read_header(user_file(spec.with_kv(())), "user")
        found = [kept] if kept and kept.architecture == spec.architecture else []
    return tuple(sorted(found, key=lambda one: one.quantized))


def read_header(path: Path, where: str) -> GeneratedFile | None:
    """None if there is no such file or it is not a generated one."""
    try:
        found = dict(DATA.findall(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return None
    if len(found) < 2:
        return None
    return GeneratedFile(path.stem.replace("_", "-"), path, where, found["FINGERPRINT"], found["ARCHITECTURE"])
