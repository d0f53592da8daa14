"""Count the files that a command enters until it starts a rank: ``python tools/command_path.py [--calls]``.

The command is ``speechtrain train`` for a new local run. The first number counts the files. The second number
counts the calls into a file that the command has already entered, because each of them makes a reader go
back. Repeated calls from one line count once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import speechtrain

PACKAGE = f"{Path(speechtrain.__file__).resolve().parent}/"
OVERRIDES = ["recipe=demo", "device=cpu", "device.threads=1", "trainer.max_steps=2", "data.workers=0"]


class PathOfCalls:
    """The files of the package in the order of the calls into them, recorded by ``sys.setprofile``."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._stack: list[str] = []  # the file of each active call
        self._calls: set[tuple[str, int, str]] = set()  # file and line of the caller, file of the function
        self._imports = 0  # the number of modules that are being imported

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call into another file than the caller's. The import of a module does not count."""
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":
            if event == "call":
                self._imports += 1
            else:
                self._imports -= 1
        file = self._file_of(frame)
        if self._imports or not file or frame.f_code.co_name.startswith("<"):
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        if not self._stack or self._stack[-1] != file:
            caller = frame.f_back
            assert caller is not None
            call = (caller.f_code.co_filename, caller.f_lineno, file)
            if call not in self._calls:
                self._calls.add(call)
                self.files.append(file)
        self._stack.append(file)

    def _file_of(self, frame: FrameType) -> str:
        """Return the file of a call, relative to the package, or an empty text outside the package."""
        _, _, file = frame.f_code.co_filename.partition(PACKAGE)
        return file

    def returns(self) -> int:
        """Return the number of entries into a file that the command entered before."""
        return len(self.files) - len(set(self.files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--calls", action="store_true", help="print the files in their order")
    arguments = parser.parse_args()
    calls = PathOfCalls()
    folder = tempfile.mkdtemp()
    original_init = subprocess.Popen.__init__

    def print_and_exit_at_rank(process: Any, args: Any, *popen_arguments: Any, **options: Any) -> None:
        if "speechtrain.rank" not in str(args):
            original_init(process, args, *popen_arguments, **options)
            return
        sys.setprofile(None)
        if arguments.calls:
            print("\n".join(calls.files))
        print(
            f"{len(set(calls.files))} files, {calls.returns()} entries into a file that was left", flush=True
        )
        shutil.rmtree(folder)
        os._exit(0)  # The rank does not start.

    subprocess.Popen.__init__ = print_and_exit_at_rank  # type: ignore[method-assign]
    from speechtrain.commands.train import run

    os.environ["OUTPUT_DIR"] = folder
    sys.setprofile(calls.record)
    run(OVERRIDES)
    sys.exit("the command did not start a rank")


if __name__ == "__main__":
    main()
