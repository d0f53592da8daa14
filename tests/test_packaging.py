"""A wheel built from this repository works without it: help, config, a real run, a user's own model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import speechtrain
from speechtrain.commands.main import COMMANDS
from tests.support.tiny_run import TINY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
INLINE = ("launcher=local", "launcher.inline=true")
OWN_MODEL = '''
from dataclasses import replace

from speechtrain.models.rnnt import RNNT
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction


class Shouting(RNNT):
    """The small RNN-T, in capitals."""

    def __init__(self, tokenizer, encoder, joint_hidden: int = 16, volume: int = 1) -> None:
        super().__init__(
            tokenizer, encoder, LSTMPrediction(8, 16, 1), Joint(joint_hidden)
        )
        self.volume = volume

    def transcribe(self, batch, decoder):
        return [replace(found, text=found.text.upper()) for found in super().transcribe(batch, decoder)]
'''


def _call(
    command: list[str], cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def _output(command: list[str], cwd: Path) -> str:
    """Return the stdout of a command that must succeed."""
    result = _call(command, cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy so that no build folder is left in the checkout."""
    source = tmp_path_factory.mktemp("source") / "speechtrain"
    source.mkdir()
    # as git ignores them; a fresh clone has neither
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    for name in ("speechtrain", "conf", "launchers", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    out = source.parent / "dist"
    build = "from setuptools.build_meta import build_{0}; print(build_{0}({1!r}))"
    out.mkdir()
    for kind in ("sdist", "wheel"):
        _output([sys.executable, "-c", build.format(kind, str(out))], source)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def site(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed by pip into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    _output([*pip, str(target), str(archives[0])], target)
    return target


def _speechtrain(
    site: Path, cwd: Path, command: str, *arguments: str, path: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPEECHTRAIN", "PYTHON"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (site, *path)))
    environment["SPEECHTRAIN_CACHE"] = str(site.parent / "cache")
    return _call([sys.executable, str(site / "bin" / command), *arguments], cwd, environment)


def _wanted() -> set[str]:
    files = {f"speechtrain/{p.relative_to(ROOT)}" for p in (ROOT / "conf").rglob("*.yaml")}
    files |= {
        f"speechtrain/{p.relative_to(ROOT)}" for p in (ROOT / "launchers").rglob("*") if p.suffix != ".pyc"
    }
    for folder in ("speechtrain", "hydra_plugins"):
        files |= {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if p.suffix != ".pyc"}
    return {
        f
        for f in files
        if "__pycache__" not in f
        and (
            ROOT / f.replace("speechtrain/conf", "conf").replace("speechtrain/launchers", "launchers")
        ).is_file()
    }


def test_everything_is_in_the_wheel(archives: tuple[Path, Path]) -> None:
    held = set(zipfile.ZipFile(archives[0]).namelist())
    assert not _wanted() - held
    assert not [
        name for name in held if name.startswith(("tests", "conf/", "launchers/", "benchmarks", "tools"))
    ]


def test_everything_is_in_the_sdist(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for name in _wanted():
        mapped = name.replace("speechtrain/conf", "conf").replace("speechtrain/launchers", "launchers")
        assert mapped in held


@pytest.fixture(scope="module")
def metadata(archives: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(archives[0]) as archive:
        name = f"speechtrain-{speechtrain.__version__}.dist-info/METADATA"
        return message_from_bytes(archive.read(name))


def test_the_metadata_are_those_of_pyproject(metadata: Message) -> None:
    assert metadata["Name"] == "speechtrain"
    assert metadata["Version"] == speechtrain.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11.1"
    assert "torch>=2.7" in metadata.get_all("Requires-Dist", [])
    assert {"hydra-core<1.4,>=1.3.8", "omegaconf<2.4,>=2.3"} <= set(metadata.get_all("Requires-Dist", []))
    assert "lhotse<1.34,>=1.33" in metadata.get_all("Requires-Dist", [])
    assert {"interop", "memory", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    urls = metadata.get_all("Project-URL", [])
    assert [url.partition(",")[0] for url in urls] == ["Homepage", "Documentation", "Changelog", "Issues"]
    assert str(metadata.get_payload()).startswith("# speechtrain")


@pytest.fixture
def empty_environment(tmp_path: Path) -> Path:
    """A virtual environment with the packages of this one on its path, because the network may be absent."""
    environment = tmp_path / "venv"
    _output([sys.executable, "-m", "venv", "--without-pip", str(environment)], tmp_path)
    site_packages = next(environment.glob("lib/python*/site-packages"))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.mark.parametrize("archive", [0, 1], ids=["wheel", "sdist"])
def test_an_archive_is_installed_into_an_empty_environment(
    archives: tuple[Path, Path], empty_environment: Path, tmp_path: Path, archive: int
) -> None:
    python = str(empty_environment / "bin" / "python")
    train = str(empty_environment / "bin" / "speechtrain-train")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    _output([*pip, "--ignore-installed", "--no-build-isolation", str(archives[archive])], tmp_path)
    program = "import speechtrain, speechtrain.launchers as l; print(speechtrain.__file__, l.__file__)"
    assert _output([python, "-c", program], tmp_path).count(str(empty_environment)) == 2
    assert speechtrain.__version__ in _output([train, "--version"], tmp_path)
    config = _output([train, "--cfg", "job", "recipe=demo"], tmp_path)
    assert "_target_: speechtrain.models.rnnt.RNNT" in config


def test_the_program_and_a_second_name_of_each_command(site: Path, tmp_path: Path) -> None:
    names = {path.name for path in (site / "bin").glob("speechtrain*")}
    assert names == {"speechtrain", *(f"speechtrain-{name}" for name in COMMANDS)}
    outcome = _speechtrain(site, tmp_path, "speechtrain", "--help")
    assert outcome.returncode == 0, outcome.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in outcome.stdout


def test_a_real_run_and_a_model_of_ones_own(site: Path, tmp_path: Path) -> None:
    done = _speechtrain(site, tmp_path, "speechtrain-train", *TINY, "run_dir=run")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 2)
    assert result["metrics"]["wer"] >= 0
    assert (tmp_path / "run" / "config.yaml").exists()

    own = tmp_path / "own"
    (own / "conf" / "model").mkdir(parents=True)
    (own / "shouting.py").write_text(OWN_MODEL)
    (own / "conf" / "model" / "shouting.yaml").write_text(
        "_target_: shouting.Shouting\njoint_hidden: 16\nvolume: 2\n"
    )
    arguments = [a for a in TINY if not a.startswith(("recipe=", "model", "decoder"))]
    arguments += ["--config-dir", "own/conf", "model=shouting", "encoder=lstm_small", "run_dir=mine"]
    refused = _speechtrain(site, tmp_path, "speechtrain-train", *arguments, path=(own,))
    assert refused.returncode == 2
    assert "allow_targets=shouting" in refused.stderr
    arguments += [*INLINE, "allow_targets=shouting"]
    done = _speechtrain(site, tmp_path, "speechtrain-train", *arguments, path=(own,))
    assert done.returncode == 0, done.stderr
    assert "shouting.Shouting" in (tmp_path / "mine" / "config.yaml").read_text()
    listed = _speechtrain(site, tmp_path, "speechtrain-train", "--help", "--config-dir", "own/conf")
    assert "shouting" in listed.stdout
