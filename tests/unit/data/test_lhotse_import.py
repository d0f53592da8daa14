"""lhotse is imported without its changes to the process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import speechtrain

PACKAGE = Path(speechtrain.__file__).parent


def test_every_import_of_lhotse_follows_the_call_that_prepares_it() -> None:
    unprepared = []
    for path in PACKAGE.rglob("*.py"):
        statement = ""  # the latest line that imports nothing
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not re.match(r"\s*(from|import) |$", line):
                statement = line.strip()
            is_prepared = statement.startswith(("import_lhotse()", "import_recipes()", "if TYPE_CHECKING:"))
            if re.match(r"\s*(from|import) lhotse\b", line) and not is_prepared:
                unprepared.append(f"{path}:{number}")
    assert not unprepared


def test_import_lhotse_may_be_called_by_several_threads() -> None:
    program = (
        "import importlib, sys, threading, time\n"
        "from speechtrain.data import lhotse_import\n"
        "import_module = importlib.import_module\n"
        "importlib.import_module = lambda name: (time.sleep(0.2), import_module(name))\n"
        "failures = []\n"
        "threading.excepthook = failures.append\n"
        "threads = [threading.Thread(target=lhotse_import.import_lhotse) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "sys.exit(len(failures))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
