"""The head of a record, for the scripts beside this file."""

from pathlib import Path

from straightline.runtime.verification.machine import describe

__all__ = ["ROOT", "describe"]

ROOT = Path(__file__).resolve().parents[2]
