"""Where indices and joined audio are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$SPEECHTRAIN_CACHE``, else ``$XDG_CACHE_HOME/speechtrain``, else ``~/.cache/speechtrain``.

    Everything in it is made again when it is missing.
    """
    own = os.environ.get("SPEECHTRAIN_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or f"{base}/speechtrain").expanduser().absolute()
