"""Count the files that a reader of ``speechtrain train`` passes: ``python tools/command_path.py [--calls]``.

The command trains one update of a new local run. The files of the package that its processes enter are
counted up to ``Trainer.fit``, and from there to the first ``optimizer.step``. The last number counts the
calls into a file that was left before, because each of them makes a reader go back. Repeated calls from one
line count once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

OVERRIDES = ["recipe=demo", "device=cpu", "device.threads=1", "device.autotune=false", "data.workers=0"]
OVERRIDES += ["encoder.hidden=16", "trainer.max_steps=1"]
FOLDER = "SPEECHTRAIN_CALLS"
"""Environment variable with the folder into which each process writes its calls."""
_STARTUP = "import runpy; runpy.run_path({file!r})['record_calls']()"


class PathOfCalls:
    """The files of the package in the order of the calls into them, recorded by ``sys.setprofile``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[str] = []
        self.files_before_fit: int | None = None  # set when ``Trainer.fit`` is called
        self._stack: list[str] = []  # the file of each active call
        self._calls: set[tuple[str, int, str]] = set()  # file and line of the caller, file of the function
        self._imports = 0  # the number of modules that are being imported

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call into another file than the caller's. The import of a module does not count."""
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            # The modules that were being imported when the recording began have no call here.
            self._imports = self._imports + 1 if event == "call" else max(0, self._imports - 1)
        if event == "call" and self._ends_recording(code.co_filename, code.co_name):
            self.write()
            os._exit(0)
        file = _file_of(code.co_filename)
        if self._imports or not file or code.co_name.startswith("<"):
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        if (file, code.co_name) == ("training/trainer.py", "fit"):
            self.files_before_fit = len(self.files)
        if not self._stack or self._stack[-1] != file:
            caller = frame.f_back
            assert caller is not None
            call = (caller.f_code.co_filename, caller.f_lineno, file)
            if call not in self._calls:
                self._calls.add(call)
                self.files.append(file)
        self._stack.append(file)

    def _ends_recording(self, file: str, name: str) -> bool:
        """Return whether a call is the first ``optimizer.step`` of the training."""
        is_step = name in ("step", "wrapper") and "/torch/optim/" in file
        return is_step and self.files_before_fit is not None and "lr_scheduler" not in file

    def write(self) -> None:
        """Write the calls of this process. Processes are read in the order of their first write."""
        content = {"files": self.files, "before_fit": self.files_before_fit}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(content))


def _file_of(path: str) -> str:
    """Return the file of a call, relative to the package, or an empty text outside the package."""
    for folder in ("/speechtrain/", "/launchers/"):
        _, found, file = path.rpartition(folder)
        if found and "/site-packages/" not in path:
            return file if folder == "/speechtrain/" else f"launchers/{file}"
    return ""


def record_calls() -> None:
    """Record the calls of this process, if it belongs to a command whose path is counted."""
    if FOLDER not in os.environ:
        return
    calls = PathOfCalls(Path(os.environ[FOLDER]))
    original_init = subprocess.Popen.__init__

    def write_and_start(process: Any, *arguments: Any, **options: Any) -> None:
        calls.write()
        original_init(process, *arguments, **options)

    subprocess.Popen.__init__ = write_and_start  # type: ignore[method-assign]
    sys.setprofile(calls.record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--calls", action="store_true", help="print the files in their order")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "calls")
        folder.mkdir()
        startup = _STARTUP.format(file=os.path.abspath(__file__))
        Path(name, "sitecustomize.py").write_text(startup)
        environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": name, "OUTPUT_DIR": f"{name}/runs"}
        command = [sys.executable, "-m", "speechtrain", "train", *OVERRIDES]
        output = subprocess.run(command, env=environment, capture_output=True, text=True)
        before: list[str] = []
        after: list[str] = []
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            content = json.loads(path.read_text())
            count = content["before_fit"]
            before += content["files"] if count is None else content["files"][:count]
            after += [] if count is None else content["files"][count:]
    if not after:
        sys.exit(f"the rank did not reach an update:\n{output.stdout}{output.stderr}")
    if arguments.calls:
        print("\n".join([*before, "-- Trainer.fit", *after]))
    returns = len(before) + len(after) - len({*before, *after})
    print(f"{len({*before})} files up to Trainer.fit, {len({*after})} from there to the first optimizer.step")
    print(f"{returns} entries into a file that was left")


if __name__ == "__main__":
    main()
