"""What the fork server of the data workers imports, once for all of them. Nothing else imports it."""

from __future__ import annotations

import warnings

import lhotse.audio.backend
import lhotse.augmentation.torchaudio  # noqa: F401 - imported for the workers, which inherit it

import speechtrain.data.batches  # noqa: F401

# multiprocessing runs the program's module again in each worker, under another name; the server has
# imported it already so that this costs nothing, and runpy warns of just that
warnings.filterwarnings(
    "ignore", message=".* found in sys.modules after import of package", category=RuntimeWarning
)
