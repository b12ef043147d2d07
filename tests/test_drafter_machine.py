from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.digest import extend
from shared.link import End, EndReason, ProposalBatch, StepBatch
from tests.support.drafting import begin, commit, drafter_of
from tests.support.proposers import RuleProposer, moody
from tests.support.virtual_pair import Clock

RANDOM = st.randoms(use_true_random=False)


class Mirror:
    """What a verifier knows of one sequence: the committed text and the guesses it was sent."""

    def __init__(self, committed: list[int], window: int) -> None:
        self.committed = committed
        self.guesses: list[int] = []
        self.window = window

    def commit(self, added: list[int], window: int, rewind: bool) -> None:
        self.guesses = [] if rewind or self.guesses[: len(added)] != added else self.guesses[len(added) :]
        self.committed, self.window = self.committed + added, window


class DrafterMachine(RuleBasedStateMachine):
    """Any order of begin, commit, end, rewind, replay, merge and step leaves drafter and verifier with the same picture."""

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.drafter = drafter_of(RuleProposer(moody), capacity=3, clock=self.clock)
        self.mirrors: dict[int, Mirror] = {}
        self.sent: set[tuple[int, int, int]] = set()
        self.epoch = self.steps = self.next_number = 0

    def tell(self, **what):
        self.steps += 1
        self.drafter.apply(StepBatch(self.steps, **what))

    @rule(token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=6), window=st.integers(0, 6))
    def begin_new(self, token_ids, window):
        number, self.next_number = self.next_number, self.next_number + 1
        self.tell(begins=(begin(number, token_ids, window),))
        if len(self.mirrors) < 3:
            self.mirrors[number] = Mirror(list(token_ids), window)

    @precondition(lambda self: self.mirrors)
    @rule(pick=RANDOM, agreeing=st.integers(0, 6), own=st.lists(st.integers(0, 2), max_size=3), window=st.integers(0, 6), rewind=st.booleans())
    def commit_next(self, pick, agreeing, own, window, rewind):
        number = pick.choice(sorted(self.mirrors))
        mirror = self.mirrors[number]
        overlap = pick.randint(0, min(3, len(mirror.committed)))
        base = len(mirror.committed) - overlap
        added = mirror.guesses[:agreeing] + own
        self.tell(commits=(commit(number, base, mirror.committed[base:] + added, window, rewind),))
        mirror.commit(added, window, rewind)
        self.epoch += rewind

    @precondition(lambda self: self.mirrors)
    @rule(pick=RANDOM, length=st.integers(0, 3))
    def replay_old_commit(self, pick, length):
        number = pick.choice(sorted(self.mirrors))
        committed = self.mirrors[number].committed
        base = pick.randint(0, max(0, len(committed) - length - 1))
        length = min(length, len(committed) - base - 1)
        self.tell(commits=(commit(number, base, committed[base : base + length], window=0, rewind=True),))

    @precondition(lambda self: self.mirrors)
    @rule(pick=RANDOM, token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def begin_again(self, pick, token_ids):
        number = pick.choice(sorted(self.mirrors))
        self.tell(begins=(begin(number, token_ids, window=4),))
        self.mirrors[number] = Mirror(list(token_ids), 4)
        self.epoch += 1

    @precondition(lambda self: self.mirrors)
    @rule(pick=RANDOM)
    def end(self, pick):
        number = pick.choice(sorted(self.mirrors))
        self.tell(ends=(End(number, EndReason.FINISHED),))
        del self.mirrors[number]

    @precondition(lambda self: self.mirrors)
    @rule(pick=RANDOM)
    def lose(self, pick):
        number = pick.choice(sorted(self.mirrors))
        self.tell(commits=(commit(number, len(self.mirrors[number].committed) + 1, (0,)),))
        del self.mirrors[number]

    @rule()
    def step(self):
        had_work = self.drafter.has_work
        frames = self.drafter.step()
        assert had_work or not frames
        for batch in frames:
            if isinstance(batch, ProposalBatch):
                assert batch.step <= self.steps
                for proposal in batch.proposals:
                    self.receive(proposal)

    def receive(self, proposal):
        mirror = self.mirrors[proposal.sequence]
        text = mirror.committed + mirror.guesses
        assert proposal.start == len(text)
        assert proposal.digest == extend(0, text)
        mirror.guesses += proposal.token_ids
        assert len(mirror.guesses) <= mirror.window
        for offset in range(len(proposal.token_ids)):
            once = (self.epoch, proposal.sequence, extend(proposal.digest, proposal.token_ids[:offset]))
            assert once not in self.sent
            self.sent.add(once)

    @invariant()
    def the_books_balance(self):
        stats = self.drafter.stats
        pending = sum(len(mirror.guesses) for mirror in self.mirrors.values())
        assert stats.sequences == len(self.mirrors)
        assert stats.guesses_sent.total() == stats.guesses_matched.total() + stats.guesses_dropped.total() + pending
        assert stats.guesses_refuted.total() <= stats.guesses_dropped.total()

    def teardown(self):
        if hasattr(self, "drafter"):
            for _ in range(300):
                if not self.drafter.has_work:
                    break
                self.step()
                # A text that makes the proposer wait would make it wait for ever.
                for number in list(self.mirrors):
                    if moody(self.mirrors[number].committed + self.mirrors[number].guesses, 1) is None:
                        self.tell(ends=(End(number, EndReason.FINISHED),))
                        del self.mirrors[number]
            assert not self.drafter.has_work


TestAnyOrderOfEvents = DrafterMachine.TestCase
