"""The files of the code host agree with the Makefile, the metadata and the formats that the host reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import speechtrain

ROOT = Path(__file__).parent.parent
HOST = ROOT / ".github"
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))
CITATION = ROOT / "CITATION.cff"
PYPROJECT = ROOT / "pyproject.toml"
PROJECT: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())["project"]
IS_INSTALLED = Path(sys.executable).with_name("check-jsonschema").exists()
has_schemas = pytest.mark.skipif(
    not IS_INSTALLED and not shutil.which("check-jsonschema"),
    reason="check-jsonschema is missing; `make setup-dev` installs it",
)


def read_yaml(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def recipe(target: str) -> list[str]:
    """Return the commands of a target of the Makefile, with the paths that the defaults give."""
    text = (ROOT / "Makefile").read_text()
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert match is not None
    lines = match[1].replace("$(BIN)", ".venv/bin").splitlines()
    return [line.strip() for line in lines]


def jobs(path: Path) -> dict[str, Any]:
    return dict(read_yaml(path)["jobs"])


def command_lines(path: Path) -> list[str]:
    """Return the ``run`` lines of a workflow's steps."""
    lines = []
    for job in jobs(path).values():
        lines.extend(step["run"] for step in job["steps"] if "run" in step)
    return lines


def make_targets(path: Path) -> list[str]:
    """Return the targets that a workflow calls, also by its matrix."""
    targets = re.findall(r"\bmake ([a-z-]+)", "\n".join(command_lines(path)))
    for job in jobs(path).values():
        targets.extend(job.get("strategy", {}).get("matrix", {}).get("target", ()))
    return targets


def test_pre_commit_is_make_check() -> None:
    config = read_yaml(ROOT / ".pre-commit-config.yaml")
    hooks = []
    for repository in config["repos"]:
        hooks.extend(repository["hooks"])
    assert [hook["entry"] for hook in hooks] == recipe("check")
    assert not any(hook["pass_filenames"] for hook in hooks)


def test_there_are_the_four_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["check", "nightly", "release", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(path: Path) -> None:
    targets = make_targets(path)
    assert targets
    for target in targets:
        assert recipe(target)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_limits(path: Path) -> None:
    assert read_yaml(path)["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        assert job["timeout-minutes"] <= 300


def test_every_suite_runs_on_the_host() -> None:
    targets = set()
    for path in WORKFLOWS:
        targets.update(make_targets(path))
    nightly_lines = "\n".join(command_lines(HOST / "workflows" / "nightly.yml"))
    assert ".ci/run" in nightly_lines
    targets.update(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    (line,) = recipe("test-nightly")
    nightly_targets = {"test-cluster", "test-attacks", "test-faults", "test-marked-nightly"}
    assert nightly_targets == set(re.findall(r"test-[a-z-]+", line))
    assert targets == {"check", "docs", "setup-dev", "test", "test-all", "wheel", *nightly_targets}


def test_the_matrix_has_each_supported_release() -> None:
    test_job = jobs(HOST / "workflows" / "test.yml")["test"]
    matrix = test_job["strategy"]["matrix"]["include"]
    pairs = {(pair["python"], pair["torch"]) for pair in matrix}
    pythons = {python for python, _ in pairs}
    torches = {torch.rpartition(".")[0] or torch for _, torch in pairs}
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}
    assert torches == {"2.7", "2.9", "2.13", "newest"}
    oldest_torch = next(line for line in PROJECT["dependencies"] if line.startswith("torch"))
    assert oldest_torch == "torch>=2.7"
    assert PROJECT["requires-python"].startswith(">=3.11")
    assert ("3.11", "2.7.1") in pairs
    classifiers = "\n".join(PROJECT["classifiers"])
    assert pythons.issuperset(re.findall(r"Python :: (3\.\d+)", classifiers))


def test_the_release_publishes_without_a_password() -> None:
    publish = jobs(HOST / "workflows" / "release.yml")["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (HOST / "workflows" / "release.yml").read_text()


def test_the_citation_is_of_this_version() -> None:
    citation = read_yaml(CITATION)
    assert citation["version"] == speechtrain.__version__
    assert citation["license"] == PROJECT["license"]


@pytest.mark.slow
@has_schemas
def test_the_schemas_and_actionlint_accept_the_files() -> None:
    command = [sys.executable, "tools/check_workflows.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@has_schemas
@pytest.mark.parametrize(
    ("name", "text", "broken"),
    [
        (".github/workflows/test.yml", "runs-on:", "run-on:"),
        ("CITATION.cff", "cff-version:", "version-of-cff:"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, broken: str) -> None:
    shutil.copytree(HOST, tmp_path / ".github")
    (tmp_path / "tools").mkdir()
    for copied in ("CITATION.cff", "tools/check_workflows.py"):
        shutil.copy(ROOT / copied, tmp_path / copied)
    content = (tmp_path / name).read_text()
    assert text in content
    (tmp_path / name).write_text(content.replace(text, broken))
    command = [sys.executable, str(tmp_path / "tools" / "check_workflows.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert name in result.stdout + result.stderr
