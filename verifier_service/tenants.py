"""How much service each tenant has had, so that who has had least goes first: the virtual token counter of Sheng et al. 2024, "Fairness in
Serving Large Language Models". It knows no queue and no request.

A tenant that comes (back) is lifted to the least served of those that are there: nobody saves up credit by staying away.
"""

from collections import Counter

_MAX_REMEMBERED = 1024  # absent tenants; of more, those with the least service are forgotten: they would be lifted first


class Tenants:
    """Service of each tenant, in weighted tokens."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._num_live: Counter[str] = Counter()

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._service)

    def join(self, tenant: str) -> None:
        """A request of the tenant has come."""
        if not self._num_live[tenant]:
            least = min((self._service[other] for other in self._num_live if other != tenant), default=0.0)
            self._service[tenant] = max(self._service.get(tenant, 0.0), least)
        self._num_live[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant is over."""
        self._num_live[tenant] -= 1
        if self._num_live[tenant] == 0:
            del self._num_live[tenant]
            self._forget()

    def charge(self, tenant: str, amount: float) -> None:
        """The tenant has had service."""
        self._service[tenant] += amount

    def service(self, tenant: str) -> float:
        """What a tenant with live requests has had so far; only comparisons mean something."""
        return self._service[tenant]

    def _forget(self) -> None:
        if not self._num_live:
            self._service.clear()  # nobody is there to be compared with
        elif len(self._service) - len(self._num_live) > _MAX_REMEMBERED:
            absent = sorted(self._service.keys() - self._num_live.keys(), key=self._service.__getitem__)
            for tenant in absent[: len(absent) // 2]:
                del self._service[tenant]
