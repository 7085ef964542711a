"""A picture of an architecture: one row a layer, in the terminal and as SVG.

Shows which layers slide and which see everything, who reads whose K/V, KV bits, experts, per-layer inputs and taps.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ...codegen.config import read_json
from ..atomic import write_text
from ..errors import StraightlineError
from .ahead import expect_place
from .drawing import drawing
from .picture import headline, rows
from .subject import read_subject, stored_as
from .terminal import terminal

HELP = "a picture of an architecture, in the terminal or as SVG"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="NAME|CHECKPOINT", help="a published name, a folder or a hub id")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture there instead")
    parser.add_argument("--taps", type=indices, default=(), metavar="5,17", help="mark these tap indices")
    parser.add_argument("--json", action="store_true", help="the rows for a program")
    parser.add_argument("--kv-config", type=Path, metavar="FILE", help="show the KV bits of this kv_config.json")


def indices(text: str) -> tuple[int, ...]:
    """ "5,17,48" as numbers. Of argparse's error it makes a usage error."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}; expected whole numbers, each once, such as 5,17,48")
    return found


def run(options: argparse.Namespace) -> int:
    subject = read_subject(options.subject)
    spec = subject.spec
    if options.kv_config:
        spec = stored_as(spec, read_json(options.kv_config, "a kv_config.json"))
    wrong = [index for index in options.taps if not -1 <= index <= spec.sentinel]
    if wrong:
        raise StraightlineError(f"--taps has {wrong[0]}; expected -1 to {spec.sentinel}")
    taps = frozenset(options.taps)
    picture = rows(spec, taps)
    if options.json:
        print(json.dumps({"name": subject.name, "layers": [asdict(row) for row in picture]}, indent=1))
        return 0
    if options.svg is None:
        print(terminal(subject.name, headline(spec), picture, taps, spec.sentinel), end="")
        return 0
    expect_place(options.svg)
    write_text(options.svg, drawing(subject.name, headline(spec), picture, taps, spec.sentinel))
    print(f"{options.svg}: written")
    return 0
