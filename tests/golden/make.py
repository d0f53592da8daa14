"""Rewrite the losses of record after a change that is meant to move them: ``python tests/golden/make.py``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))


def main() -> None:
    from tests.integration.conftest import Command
    from tests.support.golden import BANDS, GOLDEN_OVERRIDES
    from tests.support.parity import RECIPES, losses

    with tempfile.TemporaryDirectory() as folder:
        for precision in BANDS:
            run = Command(
                Path(folder) / precision, dict(os.environ), [*GOLDEN_OVERRIDES, f"precision={precision}"]
            )
            done = run.run()
            if done.returncode:
                sys.exit(done.stderr)
            lines = [f"{step} {loss:.9g}\n" for step, loss in sorted(run.losses().items())]
            (HERE / f"rnnt_small_{precision}.txt").write_text("# step, loss per utterance\n" + "".join(lines))
        for recipe in RECIPES:
            found = losses(Path(folder), recipe, "cpu", "fp32")
            lines = [f"{e} {s} {v:.9g}\n" for e, by_step in found.items() for s, v in sorted(by_step.items())]
            (HERE / f"parity_{recipe}.txt").write_text("# event, step, loss\n" + "".join(lines))


if __name__ == "__main__":
    main()
