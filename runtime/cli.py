"""The command line `straightline`: one module of `commands` for each command, imported when it is asked for.

Exit codes: 0 it holds, 1 it does not (or a checkpoint cannot be used), 2 usage, 130 interrupted.
"""

import argparse
import sys
from importlib import import_module
from typing import Any

from ..codegen.command import Parser, exit_code, failed, print_anything
from ..codegen.errors import SpecError
from .errors import StraightlineError

# Command to module. Each has `HELP`, `arguments(parser)` and `run(options) -> exit code`.
COMMANDS = {
    "explain": "explain",
    "verify": "verify",
    "bench": "bench",
    "show": "show",
    "taps": "taps",
    "kv-sensitivity": "kv_sensitivity",
}
# These hand their arguments on: `run(arguments) -> exit code`.
PASSING_ON = {
    "generate": "mlx_lm.generate on a specialized model; its flags and a few more (generate --help)",
    "serve": "mlx_lm.server on a specialized model; its flags and a few more (serve --help)",
}


def command(name: str) -> Any:
    return import_module(f".commands.{name}", __package__)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="straightline",
        description="Straight-line MLX forwards for Gemma 4, bit-equal to mlx-lm, with a tap after every layer.",
        epilog="examples: straightline explain ~/gemma-4-e4b | straightline verify --random gemma4-e4b | "
        "straightline show gemma4-26b",
        allow_abbrev=False,
    )
    chosen = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, module in COMMANDS.items():
        one = command(module)
        sub = chosen.add_parser(name, help=one.HELP, description=one.__doc__.split("\n\n")[0], allow_abbrev=False)
        one.arguments(sub)
        sub.set_defaults(run=one.run, usage_error=sub.error)
    for name, text in PASSING_ON.items():
        chosen.add_parser(name, help=text, add_help=False)
    return top


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    print_anything()
    return exit_code(lambda: _run(arguments), SpecError, StraightlineError)


def _run(arguments: list[str]) -> int:
    try:
        if arguments and arguments[0] in PASSING_ON:
            code: int = command(arguments[0]).run(arguments[1:])
        else:
            options = parser().parse_args(arguments)
            code = options.run(options)
    except RuntimeError as error:
        if not str(error).startswith("["):
            raise
        # MLX's own, such as memory that is not there: its first line says it.
        return failed("MLX: " + str(error).partition("\n")[0])
    return code
