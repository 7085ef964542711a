"""Stub."""

HELP = "x"


def arguments(p):
    pass


def run(o):
    return 0
