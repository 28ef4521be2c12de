"""The command line: `instep demo`, `run`, `train` and so on; also `python -m instep`.

Exit codes: 0 done, 1 failed, 2 called wrongly, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import instep
from instep._commands import COMMANDS, load
from instep._commands._interrupt import ignore_interrupts, ignore_repeated_interrupts
from instep._errors import ArgumentError, InstepError

FAILED, WRONG_CALL, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit code.

    Args:
        arguments: the words after `instep`; None: those this process was given.
    """
    ignore_repeated_interrupts()
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        options = make_parser().parse_args(given)
        options.given = given
        return int(options.run(options))
    except InstepError as error:
        print(f"instep: error: {_one_line(error)}", file=sys.stderr)
        return WRONG_CALL if isinstance(error, ArgumentError) else FAILED
    except KeyboardInterrupt:
        ignore_interrupts()
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, `head` say, has enough
        _drop_output()
        return BROKEN_PIPE


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands, each of which adds its own arguments."""
    parser = argparse.ArgumentParser(
        prog="instep",
        description="The gradient of a whole batch, computed by several processes.",
    )
    parser.add_argument(
        "--version", action="version", version=f"instep {instep.__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = load(name)
        text = command.__doc__ or ""
        subparser = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _one_line(error: InstepError) -> str:
    return " ".join(str(error).split())


def _drop_output() -> None:
    """Sends what is still buffered nowhere, or Python would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
