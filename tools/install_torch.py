"""Install torch for the CPU: ``install_torch.py VERSION CPU_INDEX``. VERSION may be ``newest``.

The ``torch`` of the configured package index may be the CUDA build, which requires gigabytes of packages that
a CPU never uses. The program finds this out by a dry run of pip. If the dry run lists such packages, or
fails, the program installs from PyTorch's CPU index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def needs_cuda_packages(requirement: str) -> bool | None:
    """Return whether pip would install CUDA packages from the configured index.

    Returns None if the index does not have this torch.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--dry-run", "--report", str(report), requirement]
        if subprocess.run(command, check=False).returncode != 0:
            return None
        installed = json.loads(report.read_text())["install"]
    packages = [package["metadata"]["name"].lower() for package in installed]
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
    if needs_cuda_packages(requirement) is False:
        return subprocess.run(command, check=False).returncode
    print(f"the configured index has no CPU build of {requirement}. It is installed from {cpu_index}")
    return subprocess.run([*command, "--index-url", cpu_index], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
