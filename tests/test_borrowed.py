"""Ctrl-C between any two bytecodes of lending a cache's rows and of giving them back: none is lost, none comes twice.

A trace raises the interrupt before the first bytecode of the runtime's own code, then before the second, and so on
until the call goes through. Each time the caches go on for some tokens, as the model would have them go on, and must
then hold what mlx-lm's own hold after the same tokens.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparing import assert_same
from mlx_lm.models import cache as mlx_lm_cache
from test_in_place import write_heads

from straightline import runtime
from straightline.runtime.in_place import Lease, lease_of, lying
from straightline.runtime.kv import KVCache, RotatingKVCache
from straightline.runtime.kv.batch_of_one import as_sequence, sequence_of, stand_in
from straightline.runtime.kv.borrowed import Borrowed, give_all_back

HEADS, DIM = 2, 4
PROMPT = 254
BEFORE = PROMPT + 2  # tokens at the interrupt: a growing cache is full, and grows with the next one
AFTER = BEFORE + 3
RUNTIME = str(Path(runtime.__file__).parent)
Caches = list[Any]


@cache
def token(number: int) -> mx.array:
    """keys and values, [2, 1, HEADS, 1, DIM]."""
    return mx.random.normal((2, 1, HEADS, 1, DIM), key=mx.random.key(number))


@cache
def prompt() -> mx.array:
    return mx.concatenate([token(number) for number in range(PROMPT)], axis=3)


def fed(caches: Caches, start: int, end: int, rows: Callable[[], mx.array] = prompt) -> Caches:
    for one in caches:
        if not start:
            one.update_and_fetch(*rows())
        for number in range(start or PROMPT, end):
            one.update_and_fetch(*token(number))
    mx.eval([(one.keys, one.values) for one in caches])
    return caches


def write(lease: Lease, number: int) -> None:
    """A token, as `decode` and its kernels write it."""
    for slot in lease.slots:
        slot.show()
        pairs = zip((slot.keys, slot.values), token(number), strict=True)
        write_heads(mx.array(slot.offset), slot.ring, [(np.array(buffer, copy=False), row) for buffer, row in pairs])
    lease.end(mx.zeros((1,)))


def go_on(caches: Caches, number: int) -> None:
    """One token more: what is lent as a whole is written to where it is, and all else is given back first."""
    sequence = sequence_of(caches)
    if sequence is None and lease_of(caches) is None:
        give_all_back(caches)
    found = sequence or caches
    lease = lease_of(found)
    if lease is not None:
        write(lease, number)
    else:
        give_all_back(found)
        fed(found, number, number + 1)


def sequence(end: int) -> Caches:
    return fed([RotatingKVCache(8), KVCache(), RotatingKVCache(600)], 0, end)


@cache
def given() -> mx.array:
    """The prompt as a model gives it, a token's heads as neighbours."""
    return mx.contiguous(prompt().swapaxes(2, 3)).swapaxes(2, 3)


def by_token(end: int) -> Caches:
    """Rings that keep a prompt of their size so."""
    return fed([RotatingKVCache(PROMPT), KVCache(), RotatingKVCache(PROMPT)], 0, end, given)


def batch(end: int) -> Caches:
    rings = [mlx_lm_cache.BatchRotatingKVCache(size, [0]) for size in (8, 600)]
    return fed([rings[0], mlx_lm_cache.BatchKVCache([0]), rings[1]], 0, end)


def leased(make: Callable[[int], Caches] = sequence) -> Caches:
    caches = make(BEFORE - 1)
    write(lease(caches), BEFORE - 1)
    return caches


def lease(caches: Caches) -> Lease:
    return Lease(caches, None, by_token=lying(caches))


def lone() -> Caches:
    caches = batch(BEFORE - 1)
    lend(caches)
    go_on(caches, BEFORE - 1)
    return caches


def lone_and_leased() -> Caches:
    caches = batch(BEFORE - 1)
    lend(caches)
    write(lease(caches[0].sequences), BEFORE - 1)
    return caches


def lend(caches: Caches) -> None:
    stand_in(caches, as_sequence(caches))


def read(index: int, caches: Caches) -> Any:
    return caches[index].keys


def grow(caches: Caches) -> None:
    lease = lease_of(caches)
    assert lease is not None
    for slot in lease.slots:
        slot.show()


# Caches with BEFORE tokens, and what is interrupted.
CALLS: dict[str, tuple[Callable[[], Caches], Callable[[Caches], Any]]] = {
    "a lease begins": (partial(sequence, BEFORE), lease),
    "a lease by token begins": (partial(by_token, BEFORE), lease),
    "a lease by token ends": (partial(leased, by_token), give_all_back),
    "the first of a lease is read": (leased, partial(read, 0)),
    "the second of a lease is read": (leased, partial(read, 1)),
    "a lease ends": (leased, give_all_back),
    "a lease grows": (leased, grow),
    "a batch of one begins": (partial(batch, BEFORE), lend),
    "the first of a batch of one is read": (lone, partial(read, 0)),
    "the second of a batch of one is read": (lone, partial(read, 1)),
    "a batch of one ends": (lone, give_all_back),
    "a batch of one under a lease ends": (lone_and_leased, give_all_back),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_between_any_two_bytecodes(name: str) -> None:
    make, call = CALLS[name]
    expected = states((batch if "batch" in name else by_token if "by token" in name else sequence)(AFTER))
    for step in count():
        caches = make()
        if not interrupted(partial(call, caches), step):
            break
        for number in range(BEFORE, AFTER):
            go_on(caches, number)
        give_all_back(caches)
        assert_same(states(caches), expected, f"interrupted at step {step}")
        assert not any(isinstance(one, Borrowed) for one in caches)
        assert not {"slot", "lease", "sequence", "sequences"} & {key for one in caches for key in vars(one)}
    assert step > 50


def states(caches: Caches) -> list[dict[str, Any]]:
    """All that mlx-lm knows of them, rows that no token has yet included."""
    names = ("keys", "values", "offset", "left_padding", "_idx", "_offset", "rotated", "keep", "max_size")
    return [{name: getattr(one, name) for name in names if hasattr(one, name)} for one in caches]


def interrupted(call: Callable[[], Any], step: int) -> bool:
    """Whether the call was interrupted, before the bytecode of this number."""
    steps = count()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(RUNTIME):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at it when a trace is set, and never again
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
