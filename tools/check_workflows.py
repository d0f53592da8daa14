"""Check the files of the code host against the schemas of their formats, and the workflows by actionlint.

actionlint is a program of its own. If it is not on PATH, a line says so, and the check workflow runs it.
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
"""Schemas that check-jsonschema holds, and the files that each describes."""


def program(name: str) -> str | None:
    """Return the path of a program of this environment, or else of PATH."""
    beside_python = shutil.which(name, path=Path(sys.executable).parent)
    return beside_python or shutil.which(name)


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
