"""lhotse is imported without its changes to the process."""

from __future__ import annotations

import re
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
