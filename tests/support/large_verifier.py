"""`outrider verifier` as if its model were large: `python -m tests.support.large_verifier SECONDS WHEN verifier --target ...`.

Every forward pass takes SECONDS longer. A tiny target is as quick as its draft, and then nothing is worth guessing. WHEN is `at-once`, or
`when-told`: then loading ends once a line comes on standard input.
"""

import sys
import time
from collections.abc import Sequence
from unittest import mock

import verifier_service.main
from client.cli import main
from shared.engine.forward_batch import Span
from shared.engine.model_loader import OnProgress
from shared.engine.model_runner import ModelRunner
from shared.engine.pool import Pool, PoolConfig, load_pool

if __name__ == "__main__":
    seconds, when = float(sys.argv[1]), sys.argv[2]
    forward = ModelRunner.forward

    def slow_forward(runner: ModelRunner, spans: Sequence[Span]) -> object:
        time.sleep(seconds)
        return forward(runner, spans)

    def load_when_told(config: PoolConfig, on_progress: OnProgress) -> Pool:
        pool = load_pool(config, on_progress)
        if when == "when-told":
            sys.stdin.readline()
        return pool

    with mock.patch.object(ModelRunner, "forward", slow_forward), mock.patch.object(verifier_service.main, "load_pool", load_when_told):
        main(sys.argv[3:])
