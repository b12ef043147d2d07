"""One completion as the client sees it grow: the engine's tokens with their text, cut at a stop string, and counted.

It knows neither gRPC nor the engine, only what an `Emission` says.
"""

from dataclasses import dataclass

from verifier_service.ledger import RequestLedger
from verifier_service.request import Emission, FinishReason
from verifier_service.text import TextStream

_SILENT = (FinishReason.EOS, FinishReason.STOP_TOKEN)


@dataclass(frozen=True, slots=True)
class Growth:
    """What one emission added.

    Args:
        text: whole characters; may be empty.
        token_ids: accepted draft tokens first; none after the one that completes a stop string.
        accepted: how many of the ids are accepted draft tokens.
        finish: why the completion ends with these tokens, if it does.
        matched: the stop string or token that was why.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: int
    finish: FinishReason | None = None
    matched: str | int | None = None


class GrowingCompletion:
    """Puts text to tokens and counts what is delivered.

    Args:
        text: at the end of the prompt and of the tokens resumed.
        ledger: of this request.
    """

    def __init__(self, text: TextStream, ledger: RequestLedger) -> None:
        self._text = text
        self._ledger = ledger

    def grow(self, emission: Emission) -> Growth:
        """Takes in the engine's next tokens. After a `finish` nothing may follow."""
        delta = self._text.push(emission.token_ids, last_is_silent=emission.finish in _SILENT)
        stopped, kept = delta.matched_stop is not None, delta.num_tokens_kept
        self._ledger.record(emission, kept, stopped)
        finish = FinishReason.STOP_STRING if stopped else emission.finish
        if finish is not None:
            self._ledger.finish(finish)
        rest = self._text.finish() if finish is not None else ""
        matched = delta.matched_stop if stopped else emission.matched_id
        return Growth(delta.text + rest, emission.token_ids[:kept], min(emission.accepted, kept), finish, matched)
