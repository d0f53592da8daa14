"""The runs that this user has started, remembered in the user's state folder.

Continuing a run executes code that its config names. If a command finds a run by its keys, it therefore
continues the run only if this user has started it. A user's first start of a run writes a random id into
``run.json`` and into a private file of the state folder. Later starts by this user write the same id. A run
is the user's if both ids are equal. The name of the private file is a hash of the run's path, so a run.json
that was copied into another folder does not match.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from speechtrain.errors import RunError
from speechtrain.files import absolute_path, print_line, read_text, write_text
from speechtrain.run_directory import ABOUT, read_about


def state_folder() -> Path:
    """Return ``$XDG_STATE_HOME/speechtrain``.

    It is ``~/.local/state/speechtrain`` if the variable is not set to an absolute path. Without a home
    folder, it is a path that does not exist. A folder ``~`` here may be the data of another user.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/state")
    if not os.path.isabs(base):
        base = os.devnull
    return absolute_path(f"{base}/speechtrain")


def require_started(run_dir: Path) -> None:
    """Raise RunError if this user has not started the run in ``run_dir``."""
    if _remembered_id(run_dir) is None:
        raise RunError(
            f"{run_dir} was started by another user or on another machine: "
            f"run_dir={run_dir} continues it, and executes the command that it stores"
        )


def start_id(run_dir: Path) -> str:
    """Return the id of the next start in ``run_dir``: 32 hexadecimal digits.

    A run that this user has started keeps its id. Any other run gets a new id, because the id in its
    ``run.json`` may be known to another user.
    """
    return _remembered_id(run_dir) or secrets.token_hex(16)


def remember(run_dir: Path) -> None:
    """Copy the id of the run in ``run_dir`` from its ``run.json`` into the state folder.

    Files of the state folder whose runs do not exist any more are removed. If the folder cannot be written, a
    printed line says how to continue the run later.
    """
    folder = state_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob("[!.]*"):
            # Another start may have removed the file, and the path of a run may be out of reach for a while.
            with contextlib.suppress(OSError):
                _, _, remembered_dir = read_text(path, errors="replace").partition("\n")
                if not Path(remembered_dir, ABOUT).exists():
                    path.unlink()
        text = f"{read_about(run_dir).start_id}\n{run_dir.resolve()}"
        write_text(_file(run_dir), text, durable=False, private=True)
    except OSError as error:
        print_line(f"{folder} cannot be written ({error}): only run_dir={run_dir} continues this run")


def _remembered_id(run_dir: Path) -> str | None:
    """Return the id of the run in ``run_dir``, or None.

    It is None if the state folder has no file for the run, or another id than ``run.json``.
    """
    try:
        identifier, _, _ = read_text(_file(run_dir), errors="replace").partition("\n")
    except OSError:
        return None
    return identifier if identifier == read_about(run_dir).start_id else None


def _file(run_dir: Path) -> Path:
    """Return the path of the file in the state folder for the run in ``run_dir``."""
    path = os.fsencode(run_dir.resolve())
    return state_folder() / hashlib.sha256(path).hexdigest()[:32]
