"""A verifier engine and any number of drafters in one process, on virtual time: events, links with delay and faults, no threads.

The engine and the drafters are the real ones. Each actor has its own clock: a forward pass moves it on by what the pass is said to take, and
what the actor sends leaves when its step ends.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.model_loader import LoadedModel
from shared.engine.model_runner import ModelRunner
from shared.link import Capacity, Decline, FromDrafter, Hello, ProposalBatch, Resync, StepBatch, Welcome
from shared.sampling import Mode
from verifier_service.engine import Engine, EngineLimits, StepOutput
from verifier_service.expansion import Scorer
from verifier_service.request import Emission, Request
from verifier_service.scheduler import SchedulerLimits
from verifier_service.step_cost import StepCost


class DrafterLike(Protocol):
    """What the pair needs of a drafter; `draft_service.drafter.Drafter` has it, and so have the liars of the tests."""

    @property
    def has_work(self) -> bool: ...
    def attach(self, welcome: Welcome) -> None: ...
    def apply(self, batch: StepBatch) -> None: ...
    def step(self) -> Sequence[FromDrafter]: ...
    def reset(self) -> None: ...


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


# Given a message, the delays in seconds at which copies of it arrive: one entry is the normal case, none is loss, two a duplicate.
Carrier = Callable[[object], Sequence[float]]


def delay(seconds: float) -> Carrier:
    return lambda message: (seconds,)


_NEAR = delay(0.001)


@dataclass
class Host:
    """A drafter on its own virtual machine."""

    drafter: DrafterLike
    clock: Clock
    link: int
    to_drafter: Carrier
    to_verifier: Carrier
    alive: bool = True
    frozen: bool = False
    waiting: list[StepBatch] = field(default_factory=list)
    busy: bool = False


class TimedRunner(ModelRunner):
    """A model runner whose forward passes take virtual time; `calls` has the number of tokens of each."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int, clock: Clock, seconds: float) -> None:
        super().__init__(model, num_blocks, block_size)
        self._clock = clock
        self._seconds = seconds
        self.calls: list[int] = []

    def forward(self, spans: Sequence[Span]) -> Tensor:
        self.calls.append(sum(len(span.token_ids) for span in spans))
        self._clock.now += self._seconds
        return super().forward(spans)


class VirtualPair:
    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_running: int = 16,
        max_step_tokens: int = 64,
        max_draft_tokens: int = 4,
        window: int = 8,
        vocab_size: int | None = None,
        scorer: Scorer = "expanded",
        step_s: float = 0.030,
        prefix_cache: bool = True,
        entropy: Callable[[], int] | None = None,
        make_runner: Callable[[Clock], ModelRunner] | None = None,
        step_cost: StepCost | None = None,
    ) -> None:
        self.clock = Clock()  # global time
        self.engine_clock = Clock()
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.model = model
        self.vocab_size = vocab_size or model.vocab_size
        self.max_model_len = min(model.max_model_len, num_blocks * block_size)
        self.max_draft_tokens = max_draft_tokens
        self.runner = make_runner(self.engine_clock) if make_runner else TimedRunner(model, num_blocks, block_size, self.engine_clock, step_s)
        counter = itertools.count(1)
        limits = EngineLimits(SchedulerLimits(max_running, max_step_tokens, max_draft_tokens, prefix_cache=prefix_cache), window)
        self.engine = Engine(
            self.runner, self.allocator, self.vocab_size, limits, scorer, self._tell, self.engine_clock, entropy or (lambda: next(counter)), step_cost
        )
        self.hosts: dict[int, Host] = {}
        self.emissions: list[Emission] = []
        self.outputs: list[StepOutput] = []
        self.text: dict[str, list[int]] = {}
        self.finished: dict[str, Emission] = {}
        self.proposal_batches: list[ProposalBatch] = []
        self.on_step: Callable[[], None] = lambda: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrived: list[tuple[float, int, FromDrafter]] = []
        self._engine_busy = False
        self._links = itertools.count(1)
        self._actions: dict[int, Callable[[], None]] = {}
        self._num_steps = 0
        self._numbers: dict[str, int] = {}
        self._next_number = itertools.count(1)

    # -- what a test does

    def submit(self, request: Request) -> None:
        self.text[request.request_id] = []
        self.engine_clock.now = max(self.engine_clock.now, self.clock.now)
        self._numbers[request.request_id] = number = next(self._next_number)
        self.engine.submit(number, request)
        self._at(self.clock.now, self._wake_engine)

    def cancel(self, request_id: str) -> None:
        """Cancels at once, as the thread would between two steps; what the step before gave it is dropped."""
        self.engine.cancel(self._numbers[request_id])
        self.text.pop(request_id, None)
        self.engine.check_integrity()

    def at_step(self, number: int, action: Callable[[], None]) -> None:
        """Runs `action` after the engine's step of that number, counted from 1."""
        self._actions[number] = action

    def attach(
        self,
        drafter: DrafterLike,
        clock: Clock | None = None,
        *,
        name: str = "drafter",
        capacity: int = 16,
        modes: tuple[Mode, ...] = (Mode.COUPLED, Mode.REJECTION),
        wants_hidden_state: bool = False,
        to_drafter: Carrier = _NEAR,
        to_verifier: Carrier = _NEAR,
    ) -> Host:
        link = next(self._links)
        host = Host(drafter, clock or Clock(), link, to_drafter, to_verifier)
        self.hosts[link] = host
        drafter.attach(Welcome(self.vocab_size, 64, 64, self.max_model_len, self.model.hidden_size))
        self.engine.speculation.attach(link, Hello(1, f"{name}-{link}", name, "", modes, capacity, wants_hidden_state), self.clock.now)
        self._at(self.clock.now, self._wake_engine)
        return host

    def kill(self, host: Host) -> None:
        host.alive = False
        self.hosts.pop(host.link, None)
        host.drafter.reset()
        self.engine.speculation.detach(host.link, self.clock.now)

    def freeze(self, host: Host) -> None:
        host.frozen = True

    def thaw(self, host: Host) -> None:
        host.frozen = False
        self._at(self.clock.now, lambda: self._wake_drafter(host))

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(seconds, action)

    def run(self, *requests: Request, max_events: int = 200_000) -> dict[str, list[int]]:
        """Runs until all requests have ended."""
        for request in requests:
            self.submit(request)
        for _ in range(max_events):
            if not self.engine.has_work and all(name in self.finished for name in self.text):
                return self.text
            if not self._events:
                raise AssertionError("the pair is stuck: nothing will ever happen again")
            self.clock.now, _, action = heapq.heappop(self._events)
            action()
        raise AssertionError("the pair makes no progress")

    def drain(self) -> None:
        """Lets everything that is still under way arrive."""
        while self._events:
            self.clock.now, _, action = heapq.heappop(self._events)
            action()

    # -- events

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(seconds, self.clock.now), next(self._order), action))

    def _wake_engine(self) -> None:
        if self._engine_busy:
            return
        now = self.clock.now
        self.engine_clock.now = max(self.engine_clock.now, now)
        arrived, self._arrived = self._arrived, []
        for at, link, frame in arrived:
            if isinstance(frame, ProposalBatch | Decline | Capacity | Resync):
                self.engine.speculation.receive(link, frame, at, overlapped=at < self.engine.last_step_ended)
        if not self.engine.has_work:
            return
        until = self.engine.wait_until(now)
        if until > now:
            self._at(until, self._wake_engine)
            return
        output = self.engine.step(now)
        self._num_steps += 1
        self.on_step()
        self._actions.pop(self._num_steps, lambda: None)()
        self._engine_busy = True
        self._at(self.engine_clock.now, lambda: self._step_ended(output))

    def _step_ended(self, output: StepOutput) -> None:
        self._engine_busy = False
        self.outputs.append(output)
        for _, emission in output.emissions:
            if emission.request_id not in self.text:
                continue
            self.emissions.append(emission)
            self.text[emission.request_id].extend(emission.token_ids)
            if emission.finish is not None or emission.error is not None:
                self.finished[emission.request_id] = emission
        self._wake_engine()

    def _tell(self, link: int, batch: StepBatch) -> None:
        host = self.hosts.get(link)
        if host is not None:
            for seconds in host.to_drafter(batch):
                self._at(self.engine_clock.now + seconds, lambda: self._batch_arrives(host, batch))

    def _batch_arrives(self, host: Host, batch: StepBatch) -> None:
        if host.alive:
            host.waiting.append(batch)
            self._wake_drafter(host)

    def _wake_drafter(self, host: Host) -> None:
        if host.busy or host.frozen or not host.alive:
            return
        host.clock.now = max(host.clock.now, self.clock.now)
        waiting, host.waiting = host.waiting, []
        for batch in waiting:
            host.drafter.apply(batch)
        if not host.drafter.has_work:
            return
        frames = host.drafter.step()
        host.busy = True
        self._at(host.clock.now, lambda: self._drafter_ended(host, frames))

    def _drafter_ended(self, host: Host, frames: Iterable[FromDrafter]) -> None:
        host.busy = False
        if not host.alive:
            return
        for frame in frames:
            if isinstance(frame, ProposalBatch):
                self.proposal_batches.append(frame)
            for seconds in host.to_verifier(frame):
                self._at(self.clock.now + seconds, partial(self._frame_arrives, host, frame))
        self._wake_drafter(host)

    def _frame_arrives(self, host: Host, frame: FromDrafter) -> None:
        if host.alive:
            self._arrived.append((self.clock.now, host.link, frame))
            self._wake_engine()
