"""The loop: tokens one after another, the device never waiting for the host more than it must."""

from .loop import generate_step
from .text import stream

__all__ = ["generate_step", "stream"]
