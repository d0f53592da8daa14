"""Shared by all commands: an error is printed as one line, with a trace file and an exit code by class."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from speechtrain import __version__, errors
from speechtrain.errors import (
    ConfigError,
    MachineError,
    Preempted,
    SpeechtrainError,
    disk_explained,
    escape_output,
    nearest,
    one_line,
    print_notice,
)
from speechtrain.files import lost_output
from speechtrain.runs.command_line import unquoted

_HELP_WIDTH = 100


class Parser(argparse.ArgumentParser):
    """argparse with the layout of help that all commands share.

    Wrong usage raises ConfigError, which is printed as one line like every error.
    """

    def __init__(
        self, *, description: str = "", examples: Sequence[str] = (), exit_codes: str = "", **options: Any
    ) -> None:
        sections = []
        if examples:
            sections.append("\n  ".join(["examples:", *examples]))
        if exit_codes:
            sections.append(textwrap.fill(f"exit codes: {exit_codes}", _HELP_WIDTH))
        super().__init__(
            description=textwrap.fill(description, _HELP_WIDTH),
            epilog="\n\n".join(sections),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        self.add_argument("--version", action="version", version=f"speechtrain {__version__}")

    def add_run(self) -> None:
        """Add the arguments of a command that uses a trained run."""
        self.add_argument("run", type=Path, metavar="RUN", help="run directory, also as run_dir=RUN")
        self.add_argument("--config-dir", metavar="DIR", help="a folder of your own choices for KEY=CHOICE")
        self.add_argument("--checkpoint", default="best", help="best (default), last or a folder's name")

    def parse_with_run(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse arguments in which ``run_dir=RUN`` is another form of the first argument RUN."""
        runs = []
        remainder = []
        for argument in argv:
            if argument.startswith("run_dir="):
                runs.append(unquoted(argument.removeprefix("run_dir=")))
            else:
                remainder.append(argument)
        return self.parse_intermixed_args(runs + remainder)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
        if unknown:
            options = re.findall(r"--[\w-]+", self.format_usage())  # It has -h for --help.
            message = f"unknown option {unknown[1]}{nearest(unknown[1], [*options, '--help'])}"
        raise ConfigError(f"{message}; {self.prog} --help shows the usage")


def add_command(commands: Any, name: str, meaning: str, example: str) -> Any:
    """Add the parser of a subcommand of ``prepare`` to argparse's action ``commands`` and return it."""
    examples = [f"speechtrain prepare {name} {example}"]
    return commands.add_parser(
        name, help=meaning, description=meaning, examples=examples, exit_codes="docs/reference/exit-codes.md"
    )


def console(run: Callable[[list[str]], int]) -> Callable[[], NoReturn]:
    """The entry point of a command: ``run`` with the process's arguments, then the exit with its code."""
    return lambda: sys.exit(guarded(lambda: _check_process() or run(sys.argv[1:])))


def _check_process() -> int:
    """Open closed standard streams, whose numbers a lock would get and ranks inherit; return 0.

    Raises MachineError if the working folder was deleted, in which torch's libraries would abort.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    escape_output()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise MachineError("the working folder was deleted; change to a folder that exists") from None
    return 0


def guarded(command: Callable[[], int]) -> int:
    """Run a command; print a failure as one line and return its exit code.

    A SpeechtrainError has its own code. Any other exception is a defect of speechtrain: code 1, with
    the trace in a temporary file that the line names.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except Preempted as note:
        print_notice(str(note))
        return note.exit_code
    except SpeechtrainError as error:
        print_notice(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as note:
        print_notice(": ".join(["interrupted", *map(str, note.args)]))
        return errors.EXIT_KILLED
    except Exception as error:  # the boundary of the process
        if isinstance(error, OSError) and (cause := lost_output("\n")):
            if isinstance(error, BrokenPipeError):  # the reader of the output has exited, as in `… | head`
                return 0
            print_notice(f"error: stdout: {cause}")
            return MachineError.exit_code
        if isinstance(failure := disk_explained(error), MachineError):
            print_notice(f"error: {failure}")
            return failure.exit_code
        path = Path(tempfile.mkstemp(prefix="speechtrain-", suffix=".log")[1])
        path.write_text(traceback.format_exc())
        message = one_line(f"{type(error).__name__}: {error}", 300)
        print_notice(f"internal error: {message} (trace in {path})")
        return 1
