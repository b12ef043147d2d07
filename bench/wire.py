"""Bytes on the link: what a commit and the guesses of a round take, for one sequence.

    python -m bench.wire [--k 8] [--acceptance 0.8] [--rounds 4000] [--hidden-size 576] [--json FILE]

Draws rounds of coupled mode (token ids over the whole vocabulary, long sequences, large numbers), turns them into the messages that really cross
the link and counts their bytes. No service runs: a size is the same on every machine. A drafter sends guesses one by one, as it makes them, and
as one piece only what piled up while the link was busy; a piece repeats the number, the position and the digest. gRPC's and HTTP/2's own bytes for
a message are told apart; flow control, TCP and IP are not counted.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from shared.link import Commit, HiddenState, Proposal, ProposalBatch, StepBatch
from shared.rpc.convert_link import to_speculate_request
from shared.rpc.convert_step import to_speculate_responses

_LENGTH_PREFIX_BYTES = 5  # of each gRPC message
_FRAME_HEADER_BYTES = 9  # of each HTTP/2 DATA frame
_FRAME_BYTES = 16_384  # of payload, at most; the default that gRPC keeps to


@dataclass(frozen=True, slots=True)
class Ranges:
    """What rounds are drawn from. The largest value of each is met often: it decides how long a varint may get.

    Args:
        vocab_size: ids are below it.
        max_length: of a sequence.
        max_sequence: number of a sequence; they are never reused.
        max_step: number of a step.
        window: the largest that a verifier grants.
        max_draft_s: time of a draft step.
    """

    vocab_size: int = 151_936
    max_length: int = 131_072
    max_sequence: int = 10_000_000
    max_step: int = 1_000_000_000
    window: int = 256
    max_draft_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, over all rounds drawn.

    Args:
        name: what is counted.
        num_sequences: in one message.
        mean: per sequence and round, its share of the message's own fields included.
        worst: the largest share that a message came to.
        framing: of gRPC and HTTP/2 per sequence and round, not part of the others.
    """

    name: str
    num_sequences: int
    mean: float
    worst: float
    framing: float


def measure(
    k: int, acceptance: float, num_rounds: int, batch_sizes: Sequence[int] = (1, 64), ranges: Ranges | None = None, hidden_size: int = 576
) -> list[Size]:
    """Sizes of the messages of `num_rounds` rounds of `k` guesses.

    Args:
        k: guesses in a round, at least 1.
        acceptance: chance of each guess, 0..1.
        num_rounds: of one sequence.
        batch_sizes: sequences in one message.
        ranges: what is drawn from.
        hidden_size: numbers of the hidden state that a commit brings to a speculator, in bfloat16.
    """
    hidden = HiddenState("bfloat16", (hidden_size,), bytes(2 * hidden_size))
    rng, within = random.Random(k), ranges or Ranges()
    kinds: list[tuple[str, Callable[[int], list[int]]]] = [
        ("commit", lambda count: _commits(rng, within, k, acceptance, count)),
        ("commit, with a hidden state", lambda count: _commits(rng, within, k, acceptance, count, hidden)),
        ("proposal, one piece", lambda count: _proposals(rng, within, [k], count)),
        ("proposal, one by one", lambda count: _proposals(rng, within, [1] * k, count)),
    ]
    sizes = []
    for name, draw in kinds:
        for count in batch_sizes:
            rounds = [draw(count) for _ in range(max(1, num_rounds // count))]
            shares = [sum(messages) / count for messages in rounds]
            framing = fmean(sum(map(framing_bytes, messages)) / count for messages in rounds)
            sizes.append(Size(name, count, fmean(shares), max(shares), framing))
    return sizes


def framing_bytes(message_bytes: int) -> int:
    """What gRPC and HTTP/2 add to a message."""
    framed = _LENGTH_PREFIX_BYTES + message_bytes
    return _LENGTH_PREFIX_BYTES + _FRAME_HEADER_BYTES * -(-framed // _FRAME_BYTES)


def _commits(rng: random.Random, within: Ranges, k: int, acceptance: float, count: int, hidden: HiddenState | None = None) -> list[int]:
    """Sizes of one step's messages: one, but for hidden states of many sequences."""
    commits = []
    for sequence in _sequences(rng, within, count):
        accepted = next((index for index in range(k) if rng.random() >= acceptance), k)
        window, rewind = _up_to(rng, within.window), rng.random() < 0.01
        commits.append(Commit(sequence, _up_to(rng, within.max_length), accepted, _ids(rng, within, accepted + 1), window, rewind, hidden))
    messages = to_speculate_responses(StepBatch(_up_to(rng, within.max_step), commits=tuple(commits)))
    return [message.ByteSize() for message in messages]


def _proposals(rng: random.Random, within: Ranges, pieces: Sequence[int], count: int) -> list[int]:
    """Sizes of the messages that bring one round's guesses."""
    sequences, step = list(_sequences(rng, within, count)), _up_to(rng, within.max_step)
    starts = [_up_to(rng, within.max_length) for _ in sequences]
    sizes, sent = [], 0
    for index, piece in enumerate(pieces):
        proposals = tuple(
            Proposal(sequence, start + sent, rng.getrandbits(64), _ids(rng, within, piece)) for sequence, start in zip(sequences, starts, strict=True)
        )
        batch = ProposalBatch(step, within.max_draft_s * rng.random(), proposals, idle=index == len(pieces) - 1)
        sizes.append(to_speculate_request(batch).ByteSize())
        sent += piece
    return sizes


def _sequences(rng: random.Random, within: Ranges, count: int) -> Iterable[int]:
    first = _up_to(rng, within.max_sequence)
    return range(first, first + count)


def _up_to(rng: random.Random, most: int) -> int:
    """Any number below, or one of the largest: varints grow with the number."""
    return rng.randrange(most) if rng.random() < 0.9 else most - 1


def _ids(rng: random.Random, within: Ranges, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(within.vocab_size) for _ in range(count))


def _table(sizes: Sequence[Size], k: int) -> Table:
    table = Table(title=f"bytes per sequence and round, K = {k}, coupled")
    table.add_column("what")
    for column in ("sequences in a message", "mean", "worst", "gRPC and HTTP/2 besides"):
        table.add_column(column, justify="right")
    for size in sizes:
        table.add_row(size.name, str(size.num_sequences), f"{size.mean:.1f}", f"{size.worst:.1f}", f"{size.framing:.1f}")
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=8, help="guesses in a round")
    parser.add_argument("--acceptance", type=float, default=0.8, help="chance of each guess")
    parser.add_argument("--rounds", type=int, default=4000, help="rounds of one sequence")
    parser.add_argument("--hidden-size", type=int, default=576, help="numbers of a hidden state: SmolLM2-135M has 576")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    sizes = measure(arguments.k, arguments.acceptance, arguments.rounds, hidden_size=arguments.hidden_size)
    Console().print(_table(sizes, arguments.k))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**vars(arguments), "sizes": [asdict(size) for size in sizes]}))


if __name__ == "__main__":
    main()
