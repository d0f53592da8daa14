"""The folder of indices and joined audio."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from speechtrain.data.cache import _temporary_folder, cache_folder


def test_a_user_without_a_home_folder_has_a_temporary_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "SPEECHTRAIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    no_users: dict[int, pwd.struct_passwd] = {}
    monkeypatch.setattr(pwd, "getpwuid", no_users.__getitem__)  # A container's user may have no entry.
    folder = cache_folder()
    assert folder.parent.is_dir()
    assert folder == cache_folder()
    assert "~" not in str(folder)
    _temporary_folder().cleanup()
    _temporary_folder.cache_clear()
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder() == Path("/home/user/.cache/speechtrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/other")
    assert cache_folder() == Path("/home/user/other/speechtrain")
