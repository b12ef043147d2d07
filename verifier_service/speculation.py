"""The engine's dealings with its drafters: who drafts for whom, what they are told, what came of their guesses, when to wait.

State of the engine thread. It knows no model, no KV and no gRPC; batches leave through a callback.
"""

from collections.abc import Callable, Iterable, Mapping

from shared.link import Begin, Capacity, Commit, Decline, End, EndReason, Hello, Proposal, ProposalBatch, Resync, StepBatch
from verifier_service.drafters import Drafter, Drafters
from verifier_service.generation import Generation
from verifier_service.stats import LinkCounters
from verifier_service.wait_policy import num_sequences_to_serve, num_worth_waiting_for, wait_limit_s

_RESYNC_INTERVAL_S = 1.0  # a drafter that keeps losing track of a sequence is told of it again this often at most


class Speculation:
    """Drafters and the sequences they draft for.

    Args:
        live: all live requests by sequence number; the engine's own mapping.
        tell: takes (link, batch) on its way to a drafter; must not block.
        window: most tokens beyond the committed ones that a drafter may have sent.
        max_draft_tokens: most guesses scored for a sequence in a step.
    """

    def __init__(self, live: Mapping[int, Generation], tell: Callable[[int, StepBatch], None], window: int, max_draft_tokens: int) -> None:
        self._live = live
        self._tell = tell
        self._window = window
        self._max_draft_tokens = max_draft_tokens
        self._drafters = Drafters()
        self._step = 0
        self._resynced_at: dict[int, float] = {}
        self._awaited: set[int] = set()
        self.gone = LinkCounters()  # of links that are no more

    @property
    def drafters(self) -> Iterable[Drafter]:
        """The attached ones."""
        return iter(self._drafters)

    @property
    def has_news(self) -> bool:
        """Whether a drafter is to be told something."""
        return any(drafter.begins or drafter.commits or drafter.ends for drafter in self._drafters)

    def attach(self, link: int, hello: Hello, now: float) -> None:
        """A draft service has shaken hands: sequences without a drafter become its."""
        self._drafters.attach(link, hello, now)
        self.assign(now)

    def detach(self, link: int, now: float) -> None:
        """A link is gone: what it drafted for is handed over."""
        drafter = self._drafters.detach(link)
        if drafter is None:
            return
        for generation in self._served_by(drafter):
            self._unassign(generation, drafter)
        self.gone.add(drafter.counters)
        self.assign(now)

    def receive(self, link: int, frame: ProposalBatch | Decline | Capacity | Resync, now: float, overlapped: bool) -> None:
        """Takes a frame from a drafter.

        Args:
            link: which.
            frame: already known to be well-formed.
            now: when it arrived.
            overlapped: whether that was while a step was being computed.
        """
        drafter = self._drafters.get(link)
        if drafter is None:
            return
        match frame:
            case ProposalBatch():
                self._take_proposals(drafter, frame, now, overlapped)
            case Capacity(sequences):
                drafter.capacity = sequences
                self.assign(now)
            case Decline(number):
                generation = self._live.get(number)
                if generation is not None and generation.drafter == link:
                    generation.declined.add(link)
                    self._unassign(generation, drafter)
                    self.assign(now)
            case Resync(number):
                generation = self._live.get(number)
                if generation is not None and generation.drafter == link and now - self._resynced_at.get(number, -_RESYNC_INTERVAL_S) >= _RESYNC_INTERVAL_S:
                    self._resynced_at[number] = now
                    self._begin(generation, drafter)

    def reject(self, link: int, reason: str) -> None:
        """Counts a frame that the boundary refused."""
        drafter = self._drafters.get(link)
        if drafter is not None:
            drafter.counters.rejected[reason] += 1

    def observe_round_trip(self, link: int, seconds: float) -> None:
        """Takes note of a heartbeat's round trip."""
        drafter = self._drafters.get(link)
        if drafter is not None:
            drafter.round_trip_s = seconds

    def assign(self, now: float) -> None:
        """Gives every sequence that wants a drafter and has none to one with room, and takes those of a hung one away."""
        for drafter in self._drafters.suspend_hung(now):
            for generation in self._served_by(drafter):
                self._unassign(generation, drafter)
                drafter.ends.append(End(generation.number, EndReason.REASSIGNED))
        for generation in self._live.values():
            if generation.drafter is None and generation.wants_drafter and generation.room > 0:
                request = generation.request
                chosen = self._drafters.choose(request.mode, request.preferred_drafter, generation.declined, now)
                if chosen is not None:
                    generation.drafter = chosen.link
                    chosen.sequences.add(generation.number)
                    self._begin(generation, chosen)

    def committed(self, generation: Generation, base_length: int, accepted: int, token_ids: tuple[int, ...]) -> None:
        """The target has chosen tokens: the buffer moves on, and so does the drafter's tail once it hears of it."""
        drafter = self._drafters.get(generation.drafter)
        num_dropped = generation.guesses.commit(token_ids)
        if drafter is None:
            return
        drafter.counters.dropped += num_dropped
        rewind = generation.guesses.lost
        if rewind:
            generation.guesses.clear()
        if any(begin.sequence == generation.number for begin in drafter.begins):
            self._begin(generation, drafter)  # not told yet: tell it with these tokens
        else:
            drafter.commits.append(Commit(generation.number, base_length, accepted, token_ids, self._window_of(generation), rewind))

    def ended(self, generation: Generation, reason: EndReason) -> None:
        """A request is over."""
        drafter = self._drafters.get(generation.drafter)
        self._resynced_at.pop(generation.number, None)
        if drafter is not None:
            known = not any(begin.sequence == generation.number for begin in drafter.begins)
            self._unassign(generation, drafter)
            if known:
                drafter.ends.append(End(generation.number, reason))

    def flush(self, now: float) -> None:
        """Tells each drafter what has changed for it since the last time."""
        self._step += 1
        for drafter in self._drafters:
            batch = drafter.take_batch(self._step, now)
            if batch is not None:
                self._tell(drafter.link, batch)

    def wait_until(self, decoding: list[Generation], num_others: int, step_s: float | None, since: float) -> float:
        """Time until which the next step had better wait for guesses.

        Args:
            decoding: the sequences whose next step is a decode.
            num_others: running sequences that still prefill; they are never made to wait.
            step_s: time of a plain step, seconds; None if not measured yet.
            since: when the last step ended.
        """
        self._awaited = set()
        if step_s is None or num_others or not decoding:
            return since
        num_served, deadline, turnaround_s = 0, since, 0.0
        for generation in decoding:
            drafter = self._drafters.get(generation.drafter)
            limit = min(self._max_draft_tokens, generation.request.max_draft_tokens, generation.room)
            if drafter is None or limit == 0:
                return since  # a sequence that has nothing to wait for is not delayed
            gap_s = drafter.timing.gap_s or 0.0
            expected_s = drafter.timing.turnaround_s if drafter.timing.turnaround_s is not None else step_s
            worth = num_worth_waiting_for(generation.acceptance.rate, gap_s, step_s, limit, self._runs_ahead)
            if len(generation.guesses) >= worth or drafter.idle or (drafter.vain_waits and drafter.owes_answer):
                num_served += 1
                continue
            self._awaited.add(drafter.link)
            turnaround_s = max(turnaround_s, expected_s)
            deadline = max(deadline, since + wait_limit_s(expected_s, gap_s, worth, step_s))
        if num_served >= num_sequences_to_serve(len(decoding), turnaround_s, step_s, self._runs_ahead):
            self._awaited = set()
            return since
        return deadline

    def step_starts(self) -> None:
        """A step starts: drafters that it was waiting for and that have not answered have let it wait in vain."""
        for link in self._awaited:
            drafter = self._drafters.get(link)
            if drafter is not None and drafter.owes_answer:
                drafter.vain_waits += 1
        self._awaited = set()

    @property
    def _runs_ahead(self) -> bool:
        return self._window > self._max_draft_tokens

    def _take_proposals(self, drafter: Drafter, batch: ProposalBatch, now: float, overlapped: bool) -> None:
        longest = 0
        for proposal in batch.proposals:
            longest = max(longest, self._join(drafter, proposal, overlapped))
        drafter.answer(batch.step, batch.idle, longest, now)

    def _join(self, drafter: Drafter, proposal: Proposal, overlapped: bool) -> int:
        counters, size = drafter.counters, len(proposal.token_ids)
        counters.received += size
        generation = self._live.get(proposal.sequence)
        if generation is None or generation.drafter != drafter.link:
            counters.stale["unknown_sequence"] += size
            return 0
        joined = generation.guesses.join(proposal, self._window, overlapped)
        if joined.stale is not None:
            counters.stale[joined.stale] += joined.num_stale
        if overlapped:
            counters.joined_while_computing += joined.num_joined
        return joined.num_joined

    def _served_by(self, drafter: Drafter) -> list[Generation]:
        return [self._live[number] for number in sorted(drafter.sequences) if number in self._live]

    def _begin(self, generation: Generation, drafter: Drafter) -> None:
        generation.guesses.clear()
        drafter.begins = [begin for begin in drafter.begins if begin.sequence != generation.number]
        drafter.commits = [commit for commit in drafter.commits if commit.sequence != generation.number]
        drafter.ends = [end for end in drafter.ends if end.sequence != generation.number]
        rules = generation.rules
        drafter.begins.append(
            Begin(
                sequence=generation.number,
                prompt_length=rules.prompt_length,
                token_ids=tuple(generation.committed),
                mode=generation.request.mode,
                sampling=rules.sampling,
                draft_seed=generation.draft_seed,
                window=self._window_of(generation),
                suppressed_ids=rules.suppressed_ids,
                suppressed_until=rules.suppressed_until,
            )
        )

    def _unassign(self, generation: Generation, drafter: Drafter) -> None:
        generation.guesses.clear()
        generation.drafter = None
        drafter.sequences.discard(generation.number)
        drafter.begins = [begin for begin in drafter.begins if begin.sequence != generation.number]
        drafter.commits = [commit for commit in drafter.commits if commit.sequence != generation.number]

    def _window_of(self, generation: Generation) -> int:
        return min(self._window, generation.room)
