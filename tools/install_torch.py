"""Install torch for the CPU: ``install_torch.py VERSION CPU_INDEX``. VERSION may be ``newest``.

Asks the configured package index first. A plain ``torch`` there may be the CUDA build, gigabytes of
packages that a CPU never uses: a resolver's dry run tells, and then PyTorch's CPU index is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def brings_cuda(requirement: str) -> bool | None:
    """Whether the configured index would install CUDA packages; None where it has no such torch."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--dry-run", "--report", str(report), requirement], check=False)
        if done.returncode != 0:
            return None
        packages = [item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]]
    return any(name.startswith(("nvidia", "triton", "cuda")) for name in packages)


def main() -> int:
    version, cpu_index = sys.argv[1:]
    requirement = f"torch=={version}"
    if version == "newest":
        requirement = "torch"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        requirement,
    ]
    if brings_cuda(requirement) is False:
        return subprocess.run(command, check=False).returncode
    print(f"the configured index has no CPU build of {requirement}; asking {cpu_index}")
    return subprocess.run([*command, "--index-url", cpu_index], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
