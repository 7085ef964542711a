"""Which path served each call, and why: the record that `model.dispatch` shows."""

from .errors import StraightlineError

# What a binding found out about single tokens, under these names there as well as here.
REASONS = (
    "decode_reason",
    "quantized_reason",
    "batch_reason",
    "kernels_reason",
    "in_place_reason",
    "by_token_reason",
    "compiled_reason",
    "block_reason",
)


class Dispatch:
    """counts: {"generated": n, "monolith": m}. last: the latest call's ("generated", "") or ("monolith", reason).

    reasons: why the monolith served, and how often for each reason.
    file: the module that serves generated calls, or None. reason: why none can be generated at all, or "".
    decode_reason: why single tokens take the generated file's `forward` in place of its `decode`, or "".
    quantized_reason: why those over quantized K/V do, or "".
    batch_reason: why those of a lone request in mlx-lm's batch caches do, or "".
    kernels_reason: why `decode` does without straightline's own kernels, though each is exact by itself, or "".
    compiled_reason: why it builds layers over full rings one by one there, in place of by mx.compile, or "".
    in_place_reason: why `decode` goes through the caches' own methods in place of writing to their rows, or "".
    by_token_reason: why it does so over rings whose rows lie token by token (a prompt of the window leaves some), or ""
    block_reason: why blocks of a few tokens take `forward` in place of the functions of `decode`, or "": those of one
    shape, if it begins with one.
    tier: "exact" or "fast", as asked for. tier_sites: with "fast", each attention of `decode`: ("fast" or "exact", what
    was measured, or why not).
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.counts = {"generated": 0, "monolith": 0}
        self.last: tuple[str, str] = ("", "")
        self.reasons: dict[str, int] = {}
        self.file: str | None = None
        self.reason = ""
        self.decode_reason = ""
        self.quantized_reason = ""
        self.batch_reason = ""
        self.kernels_reason = ""
        self.in_place_reason = ""
        self.by_token_reason = ""
        self.compiled_reason = ""
        self.block_reason = ""
        self.tier = "exact"
        self.tier_sites: dict[str, tuple[str, str]] = {}

    def generated(self) -> None:
        self.counts["generated"] += 1
        self.last = ("generated", "")

    def monolith(self, reason: str) -> None:
        """Raises StraightlineError in strict mode."""
        if self.strict:
            raise StraightlineError(f"strict: the generated file cannot serve this call: {reason}")
        self.counts["monolith"] += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.last = ("monolith", reason)

    def __repr__(self) -> str:
        return f"Dispatch(file={self.file!r}, counts={self.counts}, last={self.last}, reason={self.reason!r})"
