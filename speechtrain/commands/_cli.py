"""The argument parser and the entry point that all commands share.

A command prints an error as one line, and its exit code follows from the class of the error.
"""

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
    escape_output,
    explain_disk_error,
    nearest,
    one_line,
    print_notice,
)
from speechtrain.files import stdout_problem
from speechtrain.overrides import unquoted
from speechtrain.start.targets import described_error, place_of_error

_HELP_WIDTH = 100  # characters in a line of a description


class Parser(argparse.ArgumentParser):
    """A parser of arguments with the help layout of all commands. It raises ConfigError for wrong usage.

    ``examples`` are command lines, and ``exit_codes`` is their list. ``options`` are arguments of argparse.
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
        """Return the parsed arguments. ``run_dir=RUN`` anywhere is read as the first argument RUN."""
        runs = []
        other_arguments = []
        for argument in argv:
            if argument.startswith("run_dir="):
                runs.append(unquoted(argument.removeprefix("run_dir=")))
            else:
                other_arguments.append(argument)
        return self.parse_intermixed_args(runs + other_arguments)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, with a similar option if the option is unknown. argparse calls this method."""
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
        if unknown:
            options = re.findall(r"--[\w-]+", self.format_usage())
            options.append("--help")  # The usage shows -h only.
            message = f"unknown option {unknown[1]}{nearest(unknown[1], options)}"
        raise ConfigError(f"{message}; {self.prog} --help shows the usage")


def add_command(commands: Any, name: str, meaning: str, example: str, program: str = "prepare") -> Any:
    """Add the subcommand ``name`` of ``speechtrain PROGRAM`` to ``commands``, and return its parser.

    ``commands`` is the result of ``add_subparsers``, ``meaning`` is the description, and ``example`` has the
    arguments of an example.
    """
    examples = [f"speechtrain {program} {name} {example}"]
    exit_codes = "0 done, 2 usage, 3 data, 4 machine, 5 study"
    return commands.add_parser(
        name, help=meaning, description=meaning, examples=examples, exit_codes=exit_codes
    )


def parse_context(text: str) -> list[int]:
    """Return the frames of ``--context L,C,R``. Raises ConfigError for another form."""
    numbers = text.split(",")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--context {text}: give three numbers of frames, such as 120,9,0")
    return [int(number) for number in numbers]


def console(run: Callable[[list[str]], int]) -> Callable[[], NoReturn]:
    """Return the entry point of a program: it calls ``run`` with the process's arguments, and exits.

    ``run`` returns the exit code.
    """

    def command() -> int:
        _open_standard_streams()
        escape_output()
        try:
            os.getcwd()
        except FileNotFoundError:  # torch's libraries would abort the process
            raise MachineError("the working folder was deleted. Change to a folder that exists") from None
        return run(sys.argv[1:])

    return lambda: sys.exit(exit_code_of(command))


def _open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise the next file that this process opens, such as a lock, would get the stream's file descriptor,
    and the ranks would inherit and use it as their stream.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # A new file gets the lowest free descriptor, which is the descriptor of this stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. If it fails, print the error as one line."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except Preempted as error:
        print_notice(str(error))
        return error.exit_code
    except SpeechtrainError as error:
        print_notice(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        print_notice(": ".join(["interrupted", *map(str, error.args)]))
        return errors.EXIT_KILLED
    except Exception as error:  # No error may leave the process as a trace on the terminal.
        return _report_unexpected(error)


def _report_unexpected(error: Exception) -> int:
    """Print an error that is not a SpeechtrainError, and return the exit code.

    - The reader of stdout has exited: nothing is printed, and the code is 0.
    - Stdout or a disk is the cause: the code is the exit code of MachineError.
    - Any other error is a defect of speechtrain or of the user's own part. The code is 1, and the printed
      line names a temporary file with the trace.
    """
    output_problem = stdout_problem("\n") if isinstance(error, OSError) else ""
    if output_problem:
        if isinstance(error, BrokenPipeError):  # as in `… | head`
            return 0
        print_notice(f"error: stdout: {output_problem}")
        return MachineError.exit_code
    disk_error = explain_disk_error(error)
    if isinstance(disk_error, MachineError):
        print_notice(f"error: {disk_error}")
        return disk_error.exit_code
    path = Path(tempfile.mkstemp(prefix="speechtrain-", suffix=".log")[1])
    path.write_text(traceback.format_exc())
    kind = "error" if place_of_error(error) else "internal error"
    print_notice(f"{kind}: {one_line(described_error(error), 300)} (trace in {path})")
    return 1
