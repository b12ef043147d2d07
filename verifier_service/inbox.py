"""What one draft service has sent and the engine has not looked at yet: the loop puts, the engine thread takes.

While a step is computed the loop has time and the engine thread has not: guesses that follow one another are put together here, so that the
engine looks at each sequence once and not once for every piece.
"""

import threading

from shared.link import MAX_PROPOSAL_TOKENS, Capacity, Decline, ProposalBatch, Resync
from shared.merging import Pile

Frame = ProposalBatch | Decline | Capacity | Resync


class Inbox:
    """Frames in the order they came, each with the time when it did, or its last part. Safe from any thread.

    Args:
        max_frames: most frames that may wait, those that were put together counted as one.
        max_ids: most ids in all that may wait (`ProposalBatch.num_ids`); a frame with more is taken if it is alone.
    """

    def __init__(self, max_frames: int, max_ids: int) -> None:
        self._max_frames = max_frames
        self._max_ids = max_ids
        self._lock = threading.Lock()
        self._frames: list[tuple[Frame | Pile, float]] = []
        self._num_ids = 0

    def put(self, frame: Frame, arrived: float) -> bool | None:
        """Adds a frame.

        Returns:
            Whether it is the first one, so that somebody has to be told to take; None if there is no room: it was not added.
        """
        num_ids = frame.num_ids if isinstance(frame, ProposalBatch) else 0
        with self._lock:
            if self._frames and (len(self._frames) >= self._max_frames or self._num_ids + num_ids > self._max_ids):
                return None
            self._num_ids += num_ids
            last = self._frames[-1][0] if self._frames else None
            waiting: Frame | Pile = frame
            if isinstance(frame, ProposalBatch) and isinstance(last, ProposalBatch | Pile) and last.step == frame.step:
                if isinstance(last, Pile) and last.add(frame):
                    self._frames[-1] = last, arrived
                    return False
                waiting = Pile(frame, MAX_PROPOSAL_TOKENS)  # the first answer to a step stays alone: when it came tells how long the drafter takes
            self._frames.append((waiting, arrived))
            return len(self._frames) == 1

    def take(self) -> list[tuple[Frame, float]]:
        """All that waits; nothing waits then."""
        with self._lock:
            frames, self._frames = self._frames, []
            self._num_ids = 0
        return [(frame.to_batch() if isinstance(frame, Pile) else frame, arrived) for frame, arrived in frames]
