"""Is every read of a buffer ordered behind the write it is for? Asked of each graph that MLX launches, on any machine.

    bash tests/gpu/stand_in/build.sh FOLDER && . FOLDER/use.sh && . tests/gpu/path.sh
    .venv/bin/python tests/gpu/stand_in/ordered.py --random gemma4-e4b --context 512,4096 --width 1,16 --steps 16

Takes the flags of `straightline bench`. MLX's own CUDA library runs, with straightline's kernels, over a device that
computes nothing (driver.cpp): primitives and orders are those of a GPU, times are the host's alone, and there is
nothing to compare. `--unordered` takes the copies away that rings by token need (runtime/kernels/copies.py): it must
find them. Exits with 1 if a pair of kernels touches one buffer without an order, one of them writing.

Not seen: which part of a buffer is touched, so that two writes to different places count as apart; and the host's own.
"""

import ctypes
import os
import sys
from typing import Any

import mlx.core as mx

from straightline.runtime import arrays, cli, drift, facts
from straightline.runtime.in_place import sites
from straightline.runtime.kernels import selfcheck

# QKVRopeInto: the keys and the values, of (..., keys, values, ring, after).
WRITTEN = ("into", (4, 3))


def main() -> int:
    if "STAND_IN" not in os.environ:
        sys.exit("STAND_IN is not set; build the stand-in and source its use.sh first (tests/gpu/README.md)")
    driver = ctypes.CDLL(os.environ["STAND_IN"])
    fragment, places = WRITTEN
    for place in places:
        driver.stand_in_written(fragment.encode(), place)
    arguments = sys.argv[1:]
    if "--unordered" in arguments:
        arguments.remove("--unordered")
        sites._copied = lambda call, copies: call
    believe()
    print("Nothing is computed here: no bits are compared, and times are the host's.", flush=True)
    failed = cli.main(["bench", "--kernels", *arguments])
    return int(driver.stand_in_report() > 0) or failed


def believe() -> None:
    """Whatever is compared is launched, and taken to be equal."""

    def equal(found: mx.array, expected: mx.array) -> bool:
        mx.eval(found, expected)
        return True

    def compare(site: Any, call: Any, dtype: mx.Dtype, seeds: Any, rows: int = 1) -> selfcheck.Comparison:
        mx.eval(site.observed(call)(*site.inputs(0, rows, dtype)))
        return selfcheck.Comparison(1)

    replace(arrays.same_bits, equal)
    replace(selfcheck.compare, compare)
    replace(facts.check_facts, lambda *_: None)
    replace(drift.changed_upstream, lambda: "")


def replace(function: Any, other: Any) -> None:
    """Wherever a module of straightline has it by name."""
    for module in [one for name, one in sys.modules.items() if name.startswith("straightline.")]:
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, other)


if __name__ == "__main__":
    sys.exit(main())
