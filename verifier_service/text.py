"""Token ids to text as it grows: whole characters only, and no character of a stop string, ever.

What has been given out after n tokens depends on those n tokens alone, never on how they were cut into messages or runs: a
resumed request pushes its old tokens, throws their text away and goes on where the client's text ended. That is why this
does not use `tokenizers.decoders.DecodeStream`: it withholds whole characters when a run ends inside one, and cannot tell what it withholds.
It does not know why a request ends; end-of-sequence and stop tokens are the engine's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_NUM_CONTEXT_TOKENS = 8
_MAX_OPEN_CHARACTER = 3  # bytes of a character that lacks some, and so the most U+FFFD that it can be shown as
_MAX_RUBBISH = 64  # U+FFFD in a row that are given out as they are: pending tokens are decoded again at each push


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a run of tokens added.

    Args:
        text: new text, whole characters only; may be empty.
        num_tokens_kept: tokens of the run up to and including the one that completed a stop string; all without one, 0 after one.
        matched_stop: the stop string that has ended the text, if one has.
    """

    text: str
    num_tokens_kept: int
    matched_stop: str | None = None


class TextStream:
    """The text of one completion.

    Args:
        tokenizer: the model's.
        stop: stop strings, none of them empty.
        context_ids: the prompt; its last tokens tell the decoder whether a space belongs before the first word.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), context_ids: Sequence[int] = ()) -> None:
        self._detokenizer = _Detokenizer(tokenizer, context_ids)
        self._stop = _StopMatcher(stop) if stop else None
        self._matched: str | None = None

    def push(self, token_ids: Sequence[int], last_is_silent: bool = False) -> TextDelta:
        """Takes the next tokens.

        Args:
            token_ids: in order.
            last_is_silent: the last one is a stop or end-of-sequence token: counted, but not text.
        """
        spoken = token_ids[:-1] if last_is_silent else token_ids
        if self._stop is None:
            return TextDelta(self._detokenizer.push(spoken), len(token_ids))
        if self._matched is not None:
            return TextDelta("", 0, self._matched)
        text = ""
        for num_kept, token_id in enumerate(spoken, start=1):  # one by one: the token that completes a stop string must be known
            new, self._matched = self._stop.push(self._detokenizer.push((token_id,)))
            text += new
            if self._matched is not None:
                return TextDelta(text, num_kept, self._matched)
        return TextDelta(text, len(token_ids))

    def finish(self) -> str:
        """The rest: what might have become a stop string and did not, and incomplete bytes as U+FFFD. Empty after a stop string."""
        if self._matched is not None:
            return ""
        rest = self._detokenizer.flush()
        if self._stop is None:
            return rest
        text, self._matched = self._stop.push(rest)
        return text if self._matched is not None else text + self._stop.flush()


class _Detokenizer:
    """Decodes what is pending together with the tokens before it, whose text is known: decoders treat the first token apart."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context, text = self._tail(prompt_ids)
        self._context_text = text.rstrip(_REPLACEMENT)  # a prompt may end inside a character; the completion then gives it whole
        self._pending: list[int] = []
        self._num_sent = 0  # characters of the pending tokens' text that were given out

    def push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        pending = [*self._pending, *token_ids]
        text = self._text_of(pending)
        whole = text.rstrip(_REPLACEMENT)  # the rest may yet become a character
        num_open = len(text) - len(whole)
        if num_open > _MAX_OPEN_CHARACTER and len(token_ids) > 1:
            # Rubbish, or bytes that a byte-fallback decoder took for rubbish because of the last, incomplete ones. One by one it can tell.
            return "".join([self.push((token_id,)) for token_id in token_ids])
        if num_open > _MAX_RUBBISH:
            whole, num_open = text, 0
        self._pending = pending
        new = whole[self._num_sent :]
        self._num_sent += len(new)
        if num_open == 0:
            self._settle(text)
        return new

    def flush(self) -> str:
        text = self._text_of(self._pending)
        new = text[self._num_sent :]
        self._settle(text)
        return new

    def _text_of(self, pending: Sequence[int]) -> str:
        text = self._tokenizer.decode([*self._context, *pending])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # A byte-fallback decoder re-judges the bytes before an invalid one. What was given out is never retracted: start anew.
        return self._tokenizer.decode(pending)

    def _settle(self, text: str) -> None:
        """All pending text is out: it becomes the context, unless it is empty (special tokens), which tells a decoder nothing."""
        if text or not self._context:
            self._context, self._context_text = self._tail(self._pending)
        self._pending = []
        self._num_sent = 0

    def _tail(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """A few last tokens and their text, cut where no character is cut if there is such a place."""
        for num_tokens in range(_NUM_CONTEXT_TOKENS, _NUM_CONTEXT_TOKENS + _MAX_OPEN_CHARACTER + 1):
            tail = list(token_ids[-num_tokens:])
            text = self._tokenizer.decode(tail)
            if not text.startswith(_REPLACEMENT):
                break
        return tail, text


class _StopMatcher:
    """Text with stop strings cut off. The match that completes first wins; of several at the same character, the longest."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._max_held = max(map(len, stop)) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What can be given out, and the stop string that ends it, if one does."""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            _, start, matched = min(matches)
            return text[:start], matched
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(len(text), self._max_held), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
