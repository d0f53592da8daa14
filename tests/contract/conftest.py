"""The choices that every contract suite runs over: ours, and those of the packages in ``examples/``.

If the variable ``SPEECHTRAIN_PARTS`` names the folder of choices of another package, these alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig

from speechtrain.config.targets import ALLOW_TARGETS
from speechtrain.runs.compose import compose

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PARTS = os.environ.get("SPEECHTRAIN_PARTS", "")
PLUGINS = sorted((ROOT / "examples").glob("*/conf"))
FOLDERS = [CONF, *PLUGINS]
if PARTS:
    FOLDERS = PLUGINS = [Path(PARTS).resolve()]
ALL = sorted(
    (path.parent.name, path.stem)
    for conf in FOLDERS
    for path in conf.glob("*/[!_]*.yaml")
    if path.parent.name != "corpus"  # of speechtrain prepare: no group of a run
)


def choices(group: str) -> list[str]:
    return [name for folder, name in ALL if folder == group]


def folder_of(group: str, choice: str) -> list[str]:
    """The folder of choices that has this one; empty if it is ours."""
    return [str(conf) for conf in PLUGINS if (conf / group / f"{choice}.yaml").is_file()]


@cache
def _compose_once(*overrides: str) -> DictConfig:
    group, _, choice = overrides[0].partition("=")
    return compose([*overrides], *folder_of(group, choice))


def composed(group: str, choice: str, *overrides: str) -> DictConfig:
    """The config with a choice, from the folder that has it. The caller may change it."""
    return _compose_once(f"{group}={choice}", *overrides).copy()


_FORK = """
import json, os, sys, traceback
{imports}
for name, arguments in json.load(sys.stdin).items():
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        os.dup2(write, 1)
        try:
            sys.argv[1:] = arguments
            exec({code!r})
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as stream:
        output = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps([name, code, output]), flush=True)
"""


def run_in_forks(
    imports: str, code: str, arguments: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int, str]]:
    """Run ``code`` once for each item, in a process that is forked after the imports.

    Return the exit code and the output of each. An interpreter for each would import torch each time.
    """
    program = _FORK.format(imports=imports, code=code)
    process = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = {}
    for line in process.stdout.splitlines():
        name, exit_code, output = json.loads(line)
        results[name] = exit_code, output
    assert results.keys() == arguments.keys(), process.stderr
    return results


@pytest.fixture(scope="module", autouse=True)
def plugins_are_importable() -> Iterator[None]:
    """In this process and in those that it starts."""
    folders = [str(conf.parent) for conf in PLUGINS]
    names = [os.environ.get(ALLOW_TARGETS, "")]
    for folder in map(Path, folders):
        names += [path.parent.name for path in folder.glob("*/__init__.py")]
        names += [path.stem for path in folder.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")])))
        patch.setenv(ALLOW_TARGETS, ",".join(filter(None, names)))
        yield
