"""Shared by all commands: an error is printed as one line, with a trace file and an exit code by class."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from speechtrain.errors import EXIT_KILLED, ConfigError, Preempted, SpeechtrainError, one_line


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError for wrong usage, which is printed as one line like every error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help shows the usage")


def guarded(command: Callable[[], int], trace: Path | None = None) -> int:
    """Run a command; print a failure as one line and return its exit code.

    A SpeechtrainError has its own code. Any other exception is a defect of speechtrain: code 1, with
    the trace in ``trace`` or in a temporary file that the line names.
    """
    try:
        return command()
    except Preempted as note:
        print(f"speechtrain: {one_line(str(note))}", file=sys.stderr)
        return note.exit_code
    except SpeechtrainError as error:
        print(f"speechtrain: error: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("speechtrain: interrupted", file=sys.stderr)
        return EXIT_KILLED
    except BrokenPipeError:  # the reader of the output has exited, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the boundary of the process
        path = trace or Path(tempfile.mkstemp(prefix="speechtrain-", suffix=".log")[1])
        path.write_text(traceback.format_exc())
        told = one_line(f"{type(error).__name__}: {error}", 300)
        print(f"speechtrain: internal error: {told} (trace in {path})", file=sys.stderr)
        return 1


def entry_point(run: Callable[[list[str]], int]) -> Callable[[], NoReturn]:
    """The console entry point of a command whose ``run`` gets its arguments and returns its exit code."""

    def main() -> NoReturn:
        sys.exit(guarded(lambda: run(sys.argv[1:])))

    return main
