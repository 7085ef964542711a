"""The head of a record: which machine, device, versions, commit and command made it."""

import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).resolve().parents[2]  # the checkout, where there is one
PACKAGES = ("straightline", "mlx", "mlx-cuda-13", "mlx-metal", "mlx-cpu", "mlx-lm", "transformers")


def describe(commit: str | None) -> dict[str, str]:
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": commit or _commit() or "unknown",
        "machine": f"{platform.machine()}, {platform.platform()}",
        "device": f"{mx.default_device()}, {json.dumps(mx.device_info(), default=str)}",
        "driver": output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "none known",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {found}" for name in PACKAGES if (found := installed(name))),
    }


def _commit() -> str:
    if not (ROOT / ".git").exists():  # an installed copy: some other repository may lie above it
        return ""
    return output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40")


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
