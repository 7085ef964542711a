"""kernels.json in the user's cache folder: what earlier self-checks found, for each device, MLX and kernel text.

A check is written down before it starts, so that a kernel that takes its process with it twice is off from then on.
"""

import hashlib
import json
import os
import platform
import time
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any

from ..atomic import write_text
from ..user_files import cache_folder
from .backends import Backend
from .lock import locked
from .program import Program

FORMAT = 1
MLX = version("mlx")
BORN = time.time_ns()
STATES = ("checking", "kernel", "plain")


@dataclass(frozen=True)
class Finding:
    """state: "kernel" (exact), "plain" (off, with the reason), or "checking" by this process of this host.

    several: whether it was found exact for more than one row, too. deaths: how many processes died in its check.
    process, born: of the checking one its number, which a container gives to each of its processes anew, and its time.
    """

    state: str
    reason: str = ""
    several: bool = False
    deaths: int = 0
    process: int = 0
    born: int = 0
    host: str = ""

    @property
    def died(self) -> bool:
        """Whether the process that was checking is gone. Another host's cannot be told from a running one."""
        if self.state != "checking" or self.host != platform.node():
            return False
        if self.process == os.getpid():
            return self.born != BORN
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


def checking(deaths: int = 0) -> Finding:
    return Finding("checking", deaths=deaths, process=os.getpid(), born=BORN, host=platform.node())


def key(backend: Backend, program: Program, site: object) -> str:
    """Whatever may change the bits changes the key."""
    facts = (backend.name, backend.device, backend.architecture, backend.compiler, MLX, program.digest, repr(site))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]


def recall(key: str) -> Finding | None:
    return _parse(_read().get(key))


def settled(finding: Finding | None) -> tuple[Finding | None, int]:
    """What a finding comes to, None for a check that was not finished; and how many processes died in that check."""
    if finding is None or finding.state != "checking":
        return finding, 0
    # One death may have been the user's impatience.
    deaths = finding.deaths + finding.died
    return (Finding("plain", "two processes died while they checked it") if deaths > 1 else None), deaths


def remember(key: str, finding: Finding | None, about: dict[str, str]) -> None:
    """Adds or replaces one finding; None takes it out. `about` is for whoever reads the file.

    A folder that cannot be written is no error: the next process checks again.
    """
    path = cache_folder() / "kernels.json"
    try:
        with locked(path.with_suffix(".lock")):
            findings = _read()
            findings.pop(key, None)
            if finding is not None:
                findings[key] = asdict(finding) | about
            write_text(path, json.dumps({"format": FORMAT, "findings": findings}, indent=1) + "\n")
    except OSError:
        pass


def _read() -> dict[str, Any]:
    """All findings; none if the file is missing, damaged or of another format."""
    try:
        held = json.loads((cache_folder() / "kernels.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(held, dict) or held.get("format") != FORMAT or not isinstance(held.get("findings"), dict):
        return {}
    return dict(held["findings"])


def _parse(entry: Any) -> Finding | None:
    if not isinstance(entry, dict) or entry.get("state") not in STATES:
        return None
    kinds = {field.name: type(field.default) for field in fields(Finding)[1:]}
    values = {name: entry[name] for name, kind in kinds.items() if type(entry.get(name)) is kind}
    return Finding(entry["state"], **values) if len(values) == len(kinds) else None
