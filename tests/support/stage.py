"""What tests of faults play on: one verifier and the drafters that a test asks for, as real processes."""

import asyncio
from contextlib import ExitStack

from client import Client
from client.bench.delay_proxy import DelayProxy
from tests.support.model_dir import ModelDirs
from tests.support.processes import DraftProcess, Services, VerifierProcess, until


class Stage:
    """A verifier, and drafters that are always right, each behind a relay of its own. What a test has broken the next one gets anew."""

    def __init__(self, services: Services, models: ModelDirs, max_draft_tokens: int) -> None:
        self._services = services
        self._max_draft_tokens = max_draft_tokens
        self._models = models
        self._relays: dict[str, DelayProxy] = {}
        self._drafters: dict[str, DraftProcess] = {}
        self._open = ExitStack()
        self.verifier = self._launch()

    def close(self) -> None:
        self._open.close()

    def _launch(self) -> VerifierProcess:
        return self._services.launch_large_verifier(self._models.target, "--max-draft-tokens", str(self._max_draft_tokens)).serving()

    def restart_verifier(self) -> None:
        """A new process at another address: the relays lead there from now on, and it is the instance that the drafters meet next."""
        self.verifier = self._launch()
        for relay in self._relays.values():
            relay.target = self.verifier.link

    def relay(self, name: str) -> DelayProxy:
        return self._relays[name]

    async def with_drafters(self, *names: str) -> list[DraftProcess]:
        """Drafters of these names are attached, and no others."""
        if self.verifier.process.poll() is not None:
            await asyncio.to_thread(self.restart_verifier)
        for name, drafter in self._drafters.items():
            if name not in names:
                drafter.kill()
        for name in names:
            if name not in self._relays:
                self._relays[name] = self._open.enter_context(DelayProxy(self.verifier.link))
            if name not in self._drafters or self._drafters[name].process.poll() is not None:
                self._drafters[name] = self._services.launch_draft(
                    self.verifier.address, self._relays[name].address, draft=self._models.target, name=name
                )
        async with Client(self.verifier.address) as client:

            async def attached() -> bool:
                return {(drafter.name, drafter.suspended) for drafter in (await client.info()).drafters} == {(name, False) for name in names}

            await until(attached, f"just {names} are attached")
        return [self._drafters[name] for name in names]
