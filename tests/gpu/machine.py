"""The head of a record, for the scripts beside this file; by itself it prints one."""

import sys
from pathlib import Path

from straightline.runtime.verification.machine import describe

__all__ = ["ROOT", "describe"]

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    facts = describe(sys.argv[2] if sys.argv[1:2] == ["--commit"] else None)
    print("\n".join(f"{key:<9} {value}" for key, value in facts.items() if key != "command"))
