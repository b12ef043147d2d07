"""The drafter on its own thread, as the event loop sees it. It knows neither gRPC nor what a drafter does with what it is told."""

from collections.abc import Callable, Sequence

from draft_service.drafter import Drafter
from shared.engine.thread import EngineThread
from shared.link import FromDrafter, StepBatch, Welcome


class DraftEngine:
    """Runs a drafter. Its methods return at once and take effect in the order of the calls.

    Args:
        drafter: touched by nobody else once the engine has started.
        on_crash: called on the engine's thread if it ends by itself.
        clock: monotonic seconds.
    """

    def __init__(self, drafter: Drafter, on_crash: Callable[[BaseException], None], clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._send: Callable[[Sequence[FromDrafter]], None] = _nowhere
        self._thread: EngineThread[list[FromDrafter]] = EngineThread(drafter, self._deliver, on_crash, clock, "draft-engine")

    @property
    def age_s(self) -> float:
        """Seconds since the thread last showed itself."""
        return self._thread.age_s

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in, and waits for that."""
        self._thread.stop()

    def attach(self, welcome: Welcome, send: Callable[[Sequence[FromDrafter]], None]) -> None:
        """A new link; its frames go to `send`, which is called on the engine's thread."""
        self._thread.post(lambda: self._attach(welcome, send))

    def apply(self, batch: StepBatch) -> None:
        """The verifier's word."""
        self._thread.post(lambda: self._drafter.apply(batch))

    def reset(self) -> None:
        """The link is gone."""
        self._thread.post(self._reset)

    def _attach(self, welcome: Welcome, send: Callable[[Sequence[FromDrafter]], None]) -> None:
        # Between two steps: a step's frames always go to the link whose batches led to them.
        self._drafter.attach(welcome)
        self._send = send

    def _reset(self) -> None:
        self._drafter.reset()
        self._send = _nowhere

    def _deliver(self, frames: Sequence[FromDrafter]) -> None:
        if frames:
            self._send(frames)


def _nowhere(frames: Sequence[FromDrafter]) -> None:
    """No link: the verifier has given up on these guesses already."""
    del frames
