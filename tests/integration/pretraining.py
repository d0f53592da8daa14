"""wav2vec 2.0 runs for tests, many of them in little time.

As a module: a task that writes down what it draws. As a program (``python pretraining.py``): torch is
imported once, and every line on stdin, ``[config.yaml, ranks, port]``, becomes that many forked ranks;
their process ids are printed, and when all have ended their exit codes, negative for signals.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import zlib
from pathlib import Path

from speechtrain.batch import Batch
from speechtrain.models.wav2vec2 import Wav2Vec2
from speechtrain.rank import main as worker

# what every rank would import on its own; torch's takes 3 s
_SHARED = ("torch._dynamo", "soundfile", "speechtrain.data.module", "speechtrain.data.corpora.digits")


class RecordedWav2Vec2(Wav2Vec2):
    """Appends each micro-batch's address, ids, and checksums of its audio and draws to ``$DRAWN``."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        prepared = super().prepare(batch, seed)
        if self.training and seed:  # The check of the parts before the first update has the seed 0.
            drawn = {"audio": batch.audio, **prepared.extra}
            sums = {name: zlib.crc32(value.contiguous().numpy().tobytes()) for name, value in drawn.items()}
            with Path(os.environ["DRAWN"]).open("a", buffering=1) as file:
                file.write(json.dumps([batch.epoch, batch.index, self._step, batch.ids, sums]) + "\n")
        return prepared


def fork(config: str, rank: int, ranks: int, port: int) -> int:
    """A rank of a run, as ``python -m speechtrain.train_rank`` would be; its process id."""
    child = os.fork()
    if child:
        return child
    code = 70  # what is not even said in result.json
    try:
        os.environ["DRAWN"] = str(Path(config).with_name("drawn.jsonl"))
        if ranks > 1:
            world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            os.environ |= {name: str(value) for name, value in world.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(os.open(Path(config).with_name("stderr.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        code = worker.main([config])
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for name in _SHARED:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        config, ranks, port = json.loads(line)
        members = [fork(config, rank, ranks, port) for rank in range(ranks)]
        print(json.dumps(members), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(member, 0)[1]) for member in members]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
