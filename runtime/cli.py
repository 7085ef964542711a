"""The command line `straightline`: one module of `commands` for each command, imported when it is asked for.

Exit codes: 0 it holds, 1 it does not (or a checkpoint cannot be used), 2 usage, 130 interrupted.
"""

import argparse
import io
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

from ..codegen.errors import SpecError
from .errors import StraightlineError

INTERRUPTED = 128 + 2
BROKEN_PIPE = 128 + 13

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


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal cannot show
    try:
        if arguments and arguments[0] in PASSING_ON:
            code: int = command(arguments[0]).run(arguments[1:])
        else:
            options = parser().parse_args(arguments)
            code = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (SpecError, StraightlineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not str(error).startswith("["):
            raise
        # MLX's own, such as memory that is not there: its first line says it.
        print("error: MLX: " + str(error).partition("\n")[0], file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        print(f"error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    return code
