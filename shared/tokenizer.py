"""Text to token ids and back, and the fingerprint by which two services know that they mean the same by an id.

A thin wrapper around a `transformers` fast tokenizer. It does not know models, or how text is streamed (`verifier_service.text`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shared.errors import InvalidRequest, UnsupportedModel


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads: all state of the Rust tokenizer is set here, once.

    Args:
        pretrained: a loaded fast tokenizer; it must not be used elsewhere for encoding, which would change that state.
    """

    def __init__(self, pretrained: PreTrainedTokenizerFast) -> None:
        self._pretrained = pretrained
        self._backend: Backend = pretrained.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._added_bos = self._bos_added_by_the_backend()
        tokens = _real_tokens(self._backend)
        self._vocab_size = tokens[-1][0] + 1
        self._fingerprint = _fingerprint(tokens, self._backend)

    @property
    def vocab_size(self) -> int:
        """Highest real id + 1, added tokens included. The model may have more rows of logits: those stand for nothing."""
        return self._vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over (id, token bytes, is special) of the real ids in id order; nothing else goes into it."""
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with the special tokens that the model wants around it; the beginning-of-sequence token at most once."""
        token_ids: list[int] = self._backend.encode(text).ids
        if self._added_bos is not None and token_ids[:2] == [self._added_bos] * 2:
            return token_ids[1:]  # the text spelled it out
        return token_ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own template, up to where the assistant is to speak.

        Args:
            messages: each with a `role` and a `content`, oldest first.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses these messages.
        """
        if self._pretrained.chat_template is None:
            raise InvalidRequest("chat", "this model has no chat template; send text or token ids")
        conversation = [dict(message) for message in messages]
        try:
            rendered = self._pretrained.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:  # what a template raises on purpose is meant to be read
            raise InvalidRequest("chat.messages", f"the model's chat template refuses them: {error}") from error
        except Exception as error:  # a template is a program of somebody else's: anything may come out
            raise InvalidRequest("chat.messages", "the model's chat template cannot render them") from error
        # The template has written the special tokens itself: the backend must not add a second beginning-of-sequence.
        token_ids: list[int] = self._backend.encode(str(rendered), add_special_tokens=False).ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens have none, bytes that are no character become U+FFFD."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def _bos_added_by_the_backend(self) -> int | None:
        bos: int | None = self._pretrained.bos_token_id
        return bos if bos is not None and self._backend.encode("").ids[:1] == [bos] else None


def load_tokenizer(name_or_directory: str | Path) -> Tokenizer:
    """Loads a fast tokenizer from a directory or the Hugging Face hub.

    Raises:
        UnsupportedModel: there is none, it cannot be read, or it needs code of its own; the text says which.
    """
    name = str(name_or_directory)
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise UnsupportedModel(f"no tokenizer could be loaded from {name}: there is no such directory")
    try:
        pretrained = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the Rust side raises bare `Exception`, the Python side half a dozen kinds
        first_line = next(iter(str(error).splitlines()), type(error).__name__).rstrip(" :")
        raise UnsupportedModel(f"no tokenizer could be loaded from {name}: {first_line}") from error
    if not isinstance(pretrained, PreTrainedTokenizerFast):
        raise UnsupportedModel(f"{name} has no fast tokenizer (tokenizer.json), only a {type(pretrained).__name__}")
    return Tokenizer(pretrained)


def _real_tokens(backend: Backend) -> list[tuple[int, str]]:
    """(id, token) of all ids that stand for something, by id."""
    tokens = sorted((token_id, token) for token, token_id in backend.get_vocab(with_added_tokens=True).items())
    # Conversions from GGUF name the spare rows of the embedding like this: rows, not tokens.
    while tokens and tokens[-1][1] == f"[PAD{tokens[-1][0]}]":
        tokens.pop()
    if not tokens:
        raise UnsupportedModel("the tokenizer has no tokens")
    return tokens


def _fingerprint(tokens: Sequence[tuple[int, str]], backend: Backend) -> str:
    added = backend.get_added_tokens_decoder()
    byte_of = byte_alphabet() if _is_byte_level(backend) else {}
    digest = hashlib.sha256()
    for token_id, token in tokens:
        as_bytes = token.encode("utf-8", "surrogatepass")
        if token_id not in added and all(character in byte_of for character in token):
            as_bytes = bytes(byte_of[character] for character in token)
        is_special = token_id in added and added[token_id].special
        digest.update(token_id.to_bytes(4, "little") + len(as_bytes).to_bytes(4, "little") + as_bytes + bytes([is_special]))
    return digest.hexdigest()


def _is_byte_level(backend: Backend) -> bool:
    # A sequence of decoders can only be looked into through its printed form.
    return isinstance(backend.decoder, ByteLevel) or "ByteLevel(" in repr(backend.decoder)


def byte_alphabet() -> dict[str, int]:
    """Which byte a character of a byte-level token stands for (GPT-2's alphabet): itself if printable Latin-1, else 256, 257, ... in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(spare)}
