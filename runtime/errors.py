"""The one exception of the runtime, and one that is an AttributeError as well."""


class StraightlineError(Exception):
    """A model, tap, cache or file that cannot be used; the message says where, what, and what instead."""


class OtherLayout(StraightlineError, AttributeError):
    """A cache that was taken for one of another layout. `hasattr` and `getattr` see an attribute that is not there."""
