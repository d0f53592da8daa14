"""Imports for the fork server of the data workers, once for all workers. Nothing else imports this."""

from __future__ import annotations

import warnings

import speechtrain.data.lhotse_audio
import speechtrain.data.loader  # noqa: F401 - The workers inherit both imports.

# multiprocessing runs the program's module again in each worker, under another name. This costs nothing,
# because the server has already imported the module. But runpy warns about it.
warnings.filterwarnings(
    "ignore", message=".* found in sys.modules after import of package", category=RuntimeWarning
)
