"""Requests that wait, and which of them is next. It knows no blocks: whether the next one fits is the scheduler's question.

They stand in lines, one for each priority and tenant, in order of arrival. Next is the line of the highest priority; of those, the tenant that
has had least service; of those, the request that came first. A line that has been passed over `max_overtaken` times is *due* and goes
before all others. So with L lines the head of any line is next after at most `max_overtaken` + L - 1 others, whatever comes meanwhile.
Counted, not timed: the same arrivals always give the same order.
"""

from dataclasses import dataclass, field

from verifier_service.generation import Generation
from verifier_service.tenants import Tenants


@dataclass(slots=True)
class _Line:
    """Requests of one priority and tenant.

    Args:
        since: how many requests had been taken when this line last had its turn, or came to be.
    """

    since: int
    requests: list[Generation] = field(default_factory=list)


class Waiting:
    """All requests that wait.

    Args:
        tenants: tells who has had how much.
        max_overtaken: how often a line is passed over at most.
    """

    def __init__(self, tenants: Tenants, max_overtaken: int) -> None:
        self._tenants = tenants
        self._max_overtaken = max_overtaken
        self._lines: dict[tuple[int, str], _Line] = {}
        self._num_taken = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def add(self, generation: Generation) -> None:
        """Takes a request in: behind those of its line that came before it, which one that comes back may find none of.

        What it was overtaken so far counts on: coming back again and again is no way to wait forever.
        """
        since = self._num_taken - generation.overtaken
        line = self._lines.setdefault(_name(generation), _Line(since))
        place = len(line.requests)
        while place and line.requests[place - 1].number > generation.number:
            place -= 1
        line.requests.insert(place, generation)
        if place == 0:
            line.since = min(line.since, since)
        self._num_waiting += 1

    def next(self) -> Generation | None:
        """The request whose turn it is; it stays. Its `overtaken` is up to date."""
        if not self._lines:
            return None
        _, line = min(self._lines.items(), key=self._order)
        line.requests[0].overtaken = self._num_taken - line.since
        return line.requests[0]

    def take(self, generation: Generation) -> None:
        """Takes the next request out, as one whose turn it was."""
        self.remove(generation)
        self._num_taken += 1
        if _name(generation) in self._lines:
            self._lines[_name(generation)].since = self._num_taken

    def remove(self, generation: Generation) -> None:
        """Takes a request out that is given up; nobody's turn is over."""
        line = self._lines[_name(generation)]
        line.requests.remove(generation)
        if not line.requests:
            del self._lines[_name(generation)]
        self._num_waiting -= 1

    def _order(self, item: tuple[tuple[int, str], _Line]) -> tuple[int, float, float, int]:
        (priority, tenant), line = item
        head = line.requests[0].number
        if self._num_taken - line.since >= self._max_overtaken:
            return (0, line.since, 0, head)
        return (1, -priority, self._tenants.service(tenant), head)


def _name(generation: Generation) -> tuple[int, str]:
    return generation.request.priority, generation.request.tenant
