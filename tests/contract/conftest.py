"""The choices that every contract suite tests: the choices of ``conf/`` and of the packages in ``examples/``.

If the variable ``SPEECHTRAIN_PARTS`` names the folder of choices of another package, the suites test only the
choices in that folder.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig

from speechtrain.start.compose import compose
from speechtrain.start.targets import ALLOW_TARGETS

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PARTS = os.environ.get("SPEECHTRAIN_PARTS", "")
PLUGINS = sorted((ROOT / "examples").glob("*/conf"))
FOLDERS = [CONF, *PLUGINS]
if PARTS:
    FOLDERS = PLUGINS = [Path(PARTS).resolve()]


def _choices_in(conf: Path) -> list[tuple[str, str]]:
    """Return the group and the name of each choice in a config folder."""
    choices = []
    for path in conf.glob("*/[!_]*.yaml"):
        group = path.parent.name
        if group != "corpus":  # ``speechtrain prepare`` reads these files. They are not choices of a run.
            choices.append((group, path.stem))
    return choices


ALL = sorted(itertools.chain.from_iterable(map(_choices_in, FOLDERS)))


def choices(group: str) -> list[str]:
    return [name for folder, name in ALL if folder == group]


def folder_of(group: str, choice: str) -> list[str]:
    """Return the config folders of the plugins that have the choice. A choice of ``conf/`` has none."""
    return [str(conf) for conf in PLUGINS if (conf / group / f"{choice}.yaml").is_file()]


@cache
def _compose_once(*overrides: str) -> DictConfig:
    group, _, choice = overrides[0].partition("=")
    return compose([*overrides], *folder_of(group, choice))


def composed(group: str, choice: str, *overrides: str) -> DictConfig:
    """Return the config with a choice, which the caller may change."""
    return _compose_once(f"{group}={choice}", *overrides).copy()


_FORK = """
import json, os, sys, traceback
{imports}
for name, arguments in json.load(sys.stdin).items():
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        exit_code = 1
        os.dup2(write, 1)
        try:
            sys.argv[1:] = arguments
            exec({program!r})
            exit_code = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(exit_code)
    os.close(write)
    with os.fdopen(read) as stream:
        output = stream.read()
    _, status = os.waitpid(pid, 0)
    print(json.dumps([name, os.waitstatus_to_exitcode(status), output]), flush=True)
"""


def run_in_forks(
    imports: str, program: str, arguments: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int, str]]:
    """Run ``program`` once for each list of ``arguments``, in a process that is forked after the ``imports``.

    Return the exit code and the output of each process by the name of its arguments. Separate interpreters
    would each import torch.
    """
    process = subprocess.run(
        [sys.executable, "-c", _FORK.format(imports=imports, program=program)],
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
    """Make the plugins' packages importable and allowed, in this process and in its child processes."""
    folders = [str(conf.parent) for conf in PLUGINS]
    names = [os.environ.get(ALLOW_TARGETS, "")]
    for folder in map(Path, folders):
        names += [path.parent.name for path in folder.glob("*/__init__.py")]
        names += [path.stem for path in folder.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        import_path = [*folders, os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, import_path)))
        patch.setenv(ALLOW_TARGETS, ",".join(filter(None, names)))
        yield
