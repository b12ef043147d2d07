"""Who may call, and when: guards for `CallInterceptor`. They know methods by name and nothing of what they do."""

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from shared.errors import Unauthenticated, Unavailable
from shared.rpc.interceptors import Guard, Metadata


def bearer_guard(service: str, token: str) -> Guard:
    """Lets calls of a service pass that show a token in `authorization: Bearer <token>`.

    Args:
        service: full name, such as `outrider.v1.LinkService`; calls of others pass.
        token: not empty.

    Raises:
        ValueError: the token is empty: that would let everybody in who sends an empty one.
    """
    if not token:
        raise ValueError("a link token must not be empty")
    expected = f"Bearer {token}".encode()

    @contextmanager
    def guard(method: str, metadata: Metadata) -> Iterator[None]:
        if method.startswith(f"/{service}/"):
            shown = metadata.get("authorization", "")
            shown_bytes = shown.encode() if isinstance(shown, str) else shown
            if not hmac.compare_digest(shown_bytes, expected):
                raise Unauthenticated("the link token is missing or wrong")
        yield

    return guard


class Gate:
    """Whether a server takes new work: not while it loads, and not once it drains. Counts the completions that run.

    Args:
        service: for people, such as `verifier`.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._refusal: Unavailable | None = Unavailable("LOADING", f"the {service} is still loading its model")
        self._draining = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Loading is over."""
        if not self._draining:
            self._refusal = None

    async def drain(self, grace_s: float) -> None:
        """Refuse new completions and links from now on, and give the running completions `grace_s` seconds to finish."""
        self._draining = True
        self._refusal = Unavailable("DRAINING", f"the {self._service} is shutting down")
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return

    def __call__(self, method: str, metadata: Metadata) -> AbstractContextManager[None]:
        """The guard."""
        del metadata
        return self._admit(method)

    @contextmanager
    def _admit(self, method: str) -> Iterator[None]:
        is_ours = method.startswith("/outrider.v1.")
        is_new_work = not method.endswith("/GetInfo")
        if is_ours and self._refusal is not None and (is_new_work or not self._draining):
            raise self._refusal
        if not method.endswith("/Generate"):
            yield
            return
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()
