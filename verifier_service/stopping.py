"""Where a run of tokens ends a completion. Pure; stop strings are the text side's business."""

from collections.abc import Sequence
from dataclasses import dataclass

from verifier_service.request import FinishReason, Stopping


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why a completion ends.

    Args:
        num_kept: tokens of the run up to and including the one that ends it.
        reason: why.
        matched_id: the end-of-sequence or stop token, if that was why.
    """

    num_kept: int
    reason: FinishReason
    matched_id: int | None = None


def find_stop(token_ids: Sequence[int], num_generated: int, stopping: Stopping) -> Stop | None:
    """The first token of a run that ends the completion, exactly as if the tokens had come one at a time.

    Args:
        token_ids: the run, in order.
        num_generated: tokens generated before it, resumed ones included.
        stopping: the request's rules. Tokens that min_tokens forbids were masked before they could be picked.
    """
    for index, token_id in enumerate(token_ids, start=1):
        if token_id in stopping.stop_ids:
            return Stop(index, FinishReason.STOP_TOKEN, token_id)
        if token_id in stopping.eos_ids:
            return Stop(index, FinishReason.EOS, token_id)
        if num_generated + index >= stopping.max_tokens:
            return Stop(index, FinishReason.LENGTH)
    return None
