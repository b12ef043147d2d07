"""The engine's dealings with its drafters: who drafts for whom, what they are told, what came of their guesses.

State of the engine thread. It knows no model, no KV and no gRPC; batches leave through a callback.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shared.link import Begin, Capacity, Commit, Decline, End, EndReason, Hello, Proposal, ProposalBatch, Resync, StepBatch
from verifier_service.acceptance import Acceptance
from verifier_service.drafters import Drafter, Drafters
from verifier_service.generation import Generation
from verifier_service.pacing import Pacing
from verifier_service.stats import LinkCounters
from verifier_service.step_cost import StepCost

_RESYNC_INTERVAL_S = 1.0  # a drafter that keeps losing track of a sequence is told of it again this often at most


class Speculation:
    """Drafters and the sequences they draft for.

    Args:
        live: all live requests by sequence number; the engine's own mapping.
        tell: takes (link, batch) on its way to a drafter; must not block.
        window: most tokens beyond the committed ones that a drafter may have sent.
        max_draft_tokens: most guesses scored for a sequence in a step.
        cost: of a step; nothing is known of it unless it was calibrated.
    """

    def __init__(
        self,
        live: Mapping[int, Generation],
        tell: Callable[[int, StepBatch], None],
        window: int,
        max_draft_tokens: int,
        cost: StepCost | None = None,
    ) -> None:
        self._live = live
        self._tell = tell
        self._window = window
        self._drafters = Drafters()
        self._pacing = Pacing(self._drafters, window, max_draft_tokens, cost or StepCost())
        self._step = 0
        self._resynced_at: dict[int, float] = {}
        self.gone = LinkCounters()  # of links that are no more

    @property
    def drafters(self) -> Iterable[Drafter]:
        """The attached ones."""
        return iter(self._drafters)

    @property
    def pacing(self) -> Pacing:
        """When to wait for them."""
        return self._pacing

    @property
    def has_news(self) -> bool:
        """Whether a drafter is to be told something."""
        return any(drafter.has_news for drafter in self._drafters)

    @property
    def wants_hidden_states(self) -> bool:
        """Whether a drafter has asked for what the target's head reads."""
        return any(drafter.hello.wants_hidden_state for drafter in self._drafters)

    def attach(self, link: int, hello: Hello, now: float) -> None:
        """A draft service has shaken hands: sequences without a drafter become its."""
        self._drafters.attach(link, hello)
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
                for proposal in frame.proposals:
                    self._join(drafter, proposal, frame.step, now, overlapped)
                for number in frame.resting:
                    generation = self._live.get(number)
                    if generation is not None and generation.drafter == link and frame.step >= generation.told_step:
                        generation.is_resting = True
                if frame.proposals:
                    drafter.timing.told_s = frame.draft_seconds / max(len(proposal.token_ids) for proposal in frame.proposals)
                drafter.answer(frame.step, frame.idle, bool(frame.proposals), now, self._pacing.is_disturbed(overlapped))
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
                is_due = now - self._resynced_at.get(number, -_RESYNC_INTERVAL_S) >= _RESYNC_INTERVAL_S
                if generation is not None and generation.drafter == link and is_due:
                    self._resynced_at[number] = now
                    self._begin(generation, drafter)

    def reject(self, link: int, reason: str) -> None:
        """Counts a frame that the boundary refused."""
        drafter = self._drafters.get(link)
        if drafter is not None:
            drafter.counters.rejected[reason] += 1

    def assign(self, now: float) -> None:
        """Gives every sequence that wants a drafter and has none to one with room, and takes those of a hung one away."""
        for drafter in self._drafters.suspend_hung(now):
            for generation in self._served_by(drafter):
                self._unassign(generation, drafter)
                drafter.ends[generation.number] = End(generation.number, EndReason.REASSIGNED)
        for generation in self._live.values():
            is_due = self._pacing.runs_ahead or generation.num_pending == 1  # on shared cores a draft's prompt would hold up the target's
            if generation.drafter is None and generation.wants_drafter and generation.room > 0 and is_due:
                request = generation.request
                chosen = self._drafters.choose(request.mode, request.preferred_drafter, generation.declined, now)
                if chosen is not None:
                    generation.drafter = chosen.link
                    chosen.sequences.add(generation.number)
                    generation.acceptance = Acceptance.starting_at(chosen.acceptance.rate)
                    self._begin(generation, chosen)

    def committed(self, generation: Generation, base_length: int, accepted: int, token_ids: tuple[int, ...], now: float) -> None:
        """The target has chosen tokens: the buffer moves on, and so does the drafter's tail once it hears of it."""
        drafter = self._drafters.get(generation.drafter)
        settled = generation.guesses.commit(token_ids)
        if drafter is None:
            return
        if not settled.foreseen:
            generation.cut_step = self._step + 1  # of the next flush, which tells of it
        generation.told_step, generation.is_resting = self._step + 1, False
        self._pacing.committed(generation, drafter, settled.num_dropped > 0, now)
        drafter.counters.dropped += settled.num_dropped
        rewind = generation.lost
        if rewind:
            generation.guesses.clear()
            generation.lost = False
        if generation.number in drafter.begins:
            self._begin(generation, drafter)  # not told yet: tell it with these tokens
        else:
            hidden = generation.hidden if drafter.hello.wants_hidden_state else None
            commit = Commit(generation.number, base_length, accepted, token_ids, generation.granted, rewind, hidden)
            kept_back = drafter.commits.get(generation.number)
            drafter.commits[generation.number] = commit if kept_back is None else kept_back.then(commit)

    def grant(self, decoding: Sequence[Generation]) -> None:
        """Puts the windows for the next step into the commits of this one, once all of them are there."""
        self._pacing.grant(decoding)
        for generation in decoding:
            drafter = self._drafters.get(generation.drafter)
            commit = drafter.commits.get(generation.number) if drafter is not None else None
            if drafter is not None and commit is not None and commit.window != generation.granted:
                drafter.commits[generation.number] = replace(commit, window=generation.granted)

    def verified(self, generation: Generation, accepted: int, drafted: int) -> None:
        """A round is committed."""
        generation.acceptance.observe(accepted, drafted)
        drafter = self._drafters.get(generation.drafter)
        if drafter is not None:
            drafter.acceptance.observe(accepted, drafted)

    def ended(self, generation: Generation, reason: EndReason) -> None:
        """A request is over."""
        drafter = self._drafters.get(generation.drafter)
        self._resynced_at.pop(generation.number, None)
        if drafter is not None:
            self._unassign(generation, drafter)
            # Also if it has not been told of a begin yet: it may know the sequence from an earlier one.
            drafter.ends[generation.number] = End(generation.number, reason)

    def flush(self, now: float) -> None:
        """Tells each drafter what has changed for it since the last time."""
        self._step += 1
        for drafter in self._drafters:
            batch = drafter.take_batch(self._step, now)
            if batch is not None:
                self._tell(drafter.link, batch)

    def _join(self, drafter: Drafter, proposal: Proposal, step: int, now: float, overlapped: bool) -> None:
        counters, size = drafter.counters, len(proposal.token_ids)
        counters.received += size
        generation = self._live.get(proposal.sequence)
        if generation is None or generation.drafter != drafter.link:
            counters.stale["unknown_sequence"] += size
            return
        joined = generation.guesses.join(proposal, self._window, overlapped)
        if joined.stale == "gap" and step < generation.cut_step:
            counters.stale["late"] += joined.num_stale  # it goes on from guesses that the drafter has dropped meanwhile
        elif joined.stale is not None:
            generation.lost |= joined.stale == "gap"
            counters.stale[joined.stale] += joined.num_stale
        if overlapped:
            counters.joined_while_computing += joined.num_joined
        if joined.agrees:
            self._pacing.guesses_came(generation, drafter, joined.num_joined, now, overlapped)
        elif joined.stale in ("late", "mismatch"):
            self._pacing.guesses_missed(generation, drafter)

    def _served_by(self, drafter: Drafter) -> list[Generation]:
        return [self._live[number] for number in sorted(drafter.sequences) if number in self._live]

    def _begin(self, generation: Generation, drafter: Drafter) -> None:
        generation.guesses.clear()
        generation.lost, generation.is_resting = False, False
        generation.cut_step = generation.told_step = self._step + 1
        self._take_back(generation, drafter)
        drafter.ends.pop(generation.number, None)
        rules = generation.rules
        drafter.begins[generation.number] = Begin(
            sequence=generation.number,
            prompt_length=rules.prompt_length,
            token_ids=tuple(generation.committed),
            mode=generation.request.mode,
            sampling=rules.sampling,
            draft_seed=generation.draft_seed,
            window=self._pacing.first_window(generation, drafter),
            suppressed_ids=rules.suppressed_ids,
            suppressed_until=rules.suppressed_until,
            hidden=generation.hidden if drafter.hello.wants_hidden_state else None,
        )

    def _unassign(self, generation: Generation, drafter: Drafter) -> None:
        generation.guesses.clear()
        generation.drafter = None
        drafter.sequences.discard(generation.number)
        drafter.unasked.discard(generation.number)
        self._take_back(generation, drafter)

    @staticmethod
    def _take_back(generation: Generation, drafter: Drafter) -> None:
        """What has not been told of the sequence yet is not to be told any more."""
        drafter.begins.pop(generation.number, None)
        drafter.commits.pop(generation.number, None)
