"""HiddenTap: keeps chosen rows of the residual stream of one forward.

Index i in 0..n-1 is the stream that leaves layer i, n (the number of layers) is the stream after the final norm,
-1 is the scaled embedding that enters layer 0.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from .errors import StraightlineError
from .evaluation import start

Tap = Callable[[int, mx.array], mx.array]
LONG = 256  # tokens of a call from which their rows are worth the dispatch that frees them early


class HiddenTap:
    """Give it to a forward as `tap=`; read `captured` afterwards.

    layers: tap indices, in any order. Repeated ones are refused here, unknown ones by the first forward.
    position: keep only this token of the call (negative counts from the end), [B, 1, hidden] in place of
        [B, L, hidden].
    edit: called as edit(index, rows) with the [B, L, hidden] stream at each chosen index; what it returns, of the
        same shape and dtype, goes on in place of it and is what is captured. Steering: the output is then no longer
        the monolith's.

    captured: {index: mx.array} of the latest forward, in the model's dtype, by reference and not yet evaluated.
    Raises StraightlineError.
    """

    def __init__(self, layers: Iterable[int], position: int | None = None, edit: Tap | None = None) -> None:
        if not isinstance(layers, Iterable):
            raise StraightlineError(f"HiddenTap: layers is {layers!r}; expected a list of integers from -1")
        wanted = list(layers)
        for index in wanted:
            if type(index) is not int or index < -1:
                raise StraightlineError(f"HiddenTap: layers has {index!r}; expected integers from -1")
        if len(set(wanted)) < len(wanted):
            repeated = min(index for index in wanted if wanted.count(index) > 1)
            raise StraightlineError(f"HiddenTap: layers has {repeated} more than once; expected each index once")
        if position is not None and type(position) is not int:
            raise StraightlineError(f"HiddenTap: position is {position!r}; expected an integer or None")
        if edit is not None and not callable(edit):
            raise StraightlineError(f"HiddenTap: edit is {edit!r}; expected a function of an index and rows, or None")
        self.layers = frozenset(wanted)
        self.position = position
        self.edit = edit
        self.captured: dict[int, mx.array] = {}

    @property
    def edits(self) -> bool:
        """Whether another stream may go on than came in: by `edit`, or in a subclass's own way."""
        return self.edit is not None or type(self).__call__ is not HiddenTap.__call__

    def begin(self, sentinel: int, length: int) -> "HiddenTap":
        """Called at the start of a forward of `length` tokens: the tap for that forward, with nothing captured yet.

        Refuses what cannot be served.
        """
        if max(self.layers, default=sentinel) > sentinel:
            unknown = min(index for index in self.layers if index > sentinel)
            raise StraightlineError(
                f"HiddenTap: layers has {unknown}; expected -1 to {sentinel} ({sentinel} is after the final norm)"
            )
        if self.position is not None and not -length <= self.position < length:
            raise StraightlineError(
                f"HiddenTap: position is {self.position}, but the call has {length} tokens; "
                f"expected {-length} to {length - 1}"
            )
        self.captured = {}
        return self

    def end(self) -> None:
        """Called when a forward is built, before anything is evaluated."""

    def hook(self, length: int) -> Tap:
        """What a forward of `length` tokens that has begun calls at each index. For one token: a plain function."""
        if length > 1 or self.edits:
            return self
        layers, captured = self.layers, self.captured

        def keep(index: int, value: mx.array) -> mx.array:
            if index in layers:
                captured[index] = value
            return value

        return keep

    def __call__(self, index: int, value: mx.array) -> mx.array:
        if index in self.layers:
            if self.edit is not None:
                value = self._edited(index, value)
            self.captured[index] = self._kept(value)
        return value

    def _kept(self, value: mx.array) -> mx.array:
        return value if self.position is None else _row(value, self.position)

    def _edited(self, index: int, value: mx.array) -> mx.array:
        assert self.edit is not None
        edited = self.edit(index, value)
        if not isinstance(edited, mx.array) or edited.shape != value.shape or edited.dtype != value.dtype:
            found = f"{edited.dtype} {edited.shape}" if isinstance(edited, mx.array) else type(edited).__name__
            raise StraightlineError(f"HiddenTap: edit returned {found}; expected {value.dtype} {value.shape}")
        return edited


class TapRecorder(HiddenTap):
    """What `model.tapped` gives: a HiddenTap that keeps every forward, in order, while the context is open.

    steps: one {index: rows} for each forward: a prompt chunk [B, chunk, hidden], then [B, 1, hidden] a token.
        mlx-lm's generation loop runs one forward ahead of the token that it yields.
    """

    def __init__(self, layers: Iterable[int], position: int | None = None, edit: Tap | None = None) -> None:
        super().__init__(layers, position, edit)
        self.steps: list[dict[int, mx.array]] = []
        self._thread = threading.local()

    def begin(self, sentinel: int, length: int) -> HiddenTap:
        """Each forward gets a tap of its own, so that threads do not mix rows and one that fails leaves none."""
        return _Step(self, length).begin(sentinel, length)

    def add(self, rows: dict[int, mx.array], length: int) -> None:
        """The rows of a forward that is built. None stays lazy for long: it would keep its whole graph alive.

        Those of one token come with its logits, which the caller is about to ask for; starting them here would cost a
        dispatch of its own. They are started with the thread's next forward, which finds them done. A chunk of a prompt
        is asked for its caches only, so its rows are started at once.
        """
        earlier = getattr(self._thread, "token", {})
        self._thread.token = rows if length == 1 else {}
        start([*earlier.values(), *(() if length == 1 else rows.values())])
        self.captured = rows
        self.steps.append(rows)

    def rows(self, index: int) -> mx.array:
        """The rows of all forwards at one index, joined along the tokens: [B, tokens, hidden].

        Raises StraightlineError if there are none, or their batches differ in size.
        """
        if index not in self.layers:
            raise StraightlineError(f"tapped: {index} was not asked for; expected one of {sorted(self.layers)}")
        if not self.steps:
            raise StraightlineError("tapped: nothing has been run yet; expected a forward inside the context")
        batches = sorted({step[index].shape[0] for step in self.steps})
        if len(batches) > 1:
            raise StraightlineError(
                f"tapped: the forwards had batches of {', '.join(map(str, batches))}, "
                "so no rows of theirs are one text; read `steps`"
            )
        return mx.concatenate([step[index] for step in self.steps], axis=1)


class _Step(HiddenTap):
    """The tap of one forward of a TapRecorder."""

    def __init__(self, recorder: TapRecorder, length: int) -> None:
        """The recorder's settings have been checked once."""
        self.layers = recorder.layers
        self.position = recorder.position
        self.edit = recorder.edit
        self._recorder = recorder
        self._length = length

    def _kept(self, value: mx.array) -> mx.array:
        row = super()._kept(value)
        if self._length >= LONG:
            start(row)  # what is behind it can go while the later layers are still to come
        return row

    def end(self) -> None:
        self._recorder.add(self.captured, self._length)


def _row(value: mx.array, position: int) -> mx.array:
    """[B, 1, hidden], as an array of its own: a view would keep the rows of all tokens in memory."""
    length = value.shape[1]
    if length == 1:
        return value
    at = position % length
    row = mx.contiguous(value[:, at : at + 1])
    if length >= LONG:
        # Left to the end of the forward, it would keep the rows of all tokens until then.
        start(row)
    return row


def no_tap(index: int, value: Any) -> Any:
    """Stands in for a tap that nobody asked for: no graph node, nothing kept alive."""
    return value
