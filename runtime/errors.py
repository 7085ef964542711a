"""The one exception of the runtime."""


class StraightlineError(Exception):
    """A model, tap, cache or file that cannot be used; the message says where, what, and what instead."""
