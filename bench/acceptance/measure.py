"""A drafter along recorded texts: every round starts from the text as it is, whatever was guessed before. It knows no models and no files."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from bench.acceptance.texts import RecordedText
from draft_service.drafter import Drafter
from draft_service.proposer import Proposer
from draft_service.tail import count_matching
from shared.hidden import to_wire
from shared.link import Begin, Commit, Decline, End, EndReason, HiddenState, ProposalBatch, StepBatch, Welcome
from shared.sampling import Mode


@dataclass(slots=True)
class Tally:
    """What came of all rounds, counted.

    Args:
        rounds: rounds in which something was guessed.
        silent_rounds: rounds in which nothing was.
        drafted: guesses by position, from 0.
        accepted: of those, the ones that the text went on with, all before them included.
    """

    rounds: int = 0
    silent_rounds: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Accepted of drafted guesses, 0..1."""
        return self.accepted.total() / max(1, self.drafted.total())

    @property
    def mean_length(self) -> float:
        """Tokens that a round brings, silent ones included: the accepted guesses and the target's own."""
        return 1 + self.accepted.total() / max(1, self.rounds + self.silent_rounds)

    @property
    def by_position(self) -> list[float]:
        """Accepted of drafted guesses at each position: the share that went as far."""
        return [self.accepted[position] / self.drafted[position] for position in sorted(self.drafted)]

    def add(self, num_guesses: int, num_accepted: int) -> None:
        """Counts a round."""
        self.rounds += num_guesses > 0
        self.silent_rounds += num_guesses == 0
        self.drafted.update(range(num_guesses))
        self.accepted.update(range(num_accepted))


@dataclass(slots=True)
class _Reader:
    """One text, read as far as `length`."""

    text: RecordedText
    rows: Tensor | None
    length: int

    @property
    def hidden(self) -> HiddenState | None:
        return None if self.rows is None else to_wire(self.rows[self.length - 2 : self.length - 1])[0]


def measure(proposer: Proposer, texts: Sequence[RecordedText], rows: Sequence[Tensor | None], num_guesses: int, batch: int, vocab_size: int) -> Tally:
    """Takes a proposer through texts in coupled mode.

    Args:
        proposer: under a drafter, as in the draft service.
        texts: in this order, a new one whenever one is finished.
        rows: of each, what the target's head read, for proposers that go by it: see `head_inputs`.
        num_guesses: most in a round; a round for which the text has not as many tokens and one more is left out.
        batch: texts at once.
        vocab_size: ids of the tokenizer.
    """
    drafter, tally, numbers = Drafter(proposer, batch, lambda: 0.0), Tally(), count(1)
    drafter.attach(Welcome(vocab_size, num_guesses, 64, max(len(text.token_ids) for text in texts) + num_guesses + 1))
    waiting = deque(_Reader(text, row, text.prompt_length + 1) for text, row in zip(texts, rows, strict=True))
    reading: dict[int, _Reader] = {}
    step, commits = 0, list[Commit]()
    while waiting or reading:
        step += 1
        ends = [number for number, reader in reading.items() if len(reader.text.token_ids) - reader.length <= num_guesses]
        for number in ends:
            del reading[number]
        begins = []
        while waiting and len(reading) < batch:
            number, reader = next(numbers), waiting.popleft()
            reading[number] = reader
            begins.append(_begin(number, reader, num_guesses))
        told = tuple(commit for commit in commits if commit.sequence in reading)
        drafter.apply(StepBatch(step, tuple(begins), told, tuple(End(number, EndReason.FINISHED) for number in ends)))
        commits = _judge(_guess(drafter), reading, tally, num_guesses)
    return tally


def _begin(number: int, reader: _Reader, window: int) -> Begin:
    text = reader.text
    committed = text.token_ids[: reader.length]
    return Begin(number, text.prompt_length, committed, Mode.COUPLED, text.sampling, text.seed, window, hidden=reader.hidden)


def _guess(drafter: Drafter) -> dict[int, list[int]]:
    guesses: dict[int, list[int]] = {}
    while drafter.has_work:
        for frame in drafter.step():
            if isinstance(frame, Decline):
                raise RuntimeError(f"the drafter declines: {frame.reason}")
            for proposal in frame.proposals if isinstance(frame, ProposalBatch) else ():
                guesses.setdefault(proposal.sequence, []).extend(proposal.token_ids)
    return guesses


def _judge(guesses: dict[int, list[int]], reading: dict[int, _Reader], tally: Tally, num_guesses: int) -> list[Commit]:
    """Counts a round of every text and moves each on, as the target would."""
    commits = []
    for number, reader in reading.items():
        if len(reader.text.token_ids) - reader.length <= num_guesses:
            continue
        made, base = guesses.get(number, []), reader.length
        accepted = count_matching(made, reader.text.token_ids[base : base + num_guesses])
        tally.add(len(made), accepted)
        reader.length = base + accepted + 1
        commits.append(Commit(number, base, accepted, reader.text.token_ids[base : reader.length], num_guesses, hidden=reader.hidden))
    return commits
