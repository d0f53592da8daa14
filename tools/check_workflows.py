"""Check the files for GitHub against the schemas of their formats, and the workflows with actionlint.

actionlint is not a Python package. If it is not on PATH, this program prints a line and skips it. The
workflow "check" has it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.dependabot": ".github/dependabot.yml",
    "vendor.citation-file-format": "CITATION.cff",
}
"""The pattern of the files for each schema that check-jsonschema contains."""


def program(name: str) -> str | None:
    """Return the path of a program of this Python environment, or else of PATH. None if there is none."""
    in_environment = shutil.which(name, path=Path(sys.executable).parent)
    return in_environment or shutil.which(name)


def main() -> int:
    schema_check = program("check-jsonschema")
    if schema_check is None:
        print("check_workflows: check-jsonschema is missing. `make setup-dev` installs it", file=sys.stderr)
        return 1
    code = 0
    for schema, pattern in SCHEMAS.items():
        paths = sorted(map(str, ROOT.glob(pattern)))
        command = [schema_check, "--builtin-schema", schema, *paths]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            print(result.stdout + result.stderr, file=sys.stderr)
            code = 1
    actionlint = program("actionlint")
    if actionlint is None:
        print("check_workflows: actionlint is not installed, so only the schemas were checked")
    else:
        code = max(code, subprocess.run([actionlint], cwd=ROOT, check=False).returncode)
    return code


if __name__ == "__main__":
    sys.exit(main())
