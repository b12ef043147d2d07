"""Small but real tokenizers: byte-level BPE whose emoji, CJK and combining characters lie in several tokens, and a byte-fallback one."""

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

BOS = "<s>"
EOS = "</s>"
PLAIN_ADDED = "<tool>"  # an added token that is text, not special
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'nobody' %}{{ raise_exception('nobody cannot speak') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
_WORDS = (" the", "end", "stop", "STOP", "hello", " world", "aab", "ab", "\n\n")


def byte_level_backend(words: Sequence[str] = _WORDS) -> Backend:
    """Ids 0 and 1 are special, 2 is an added word, then the 256 bytes, then the beginnings of the words."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    to_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [BOS, EOS, PLAIN_ADDED, *sorted(alphabet)]
    merges = []
    for word in words:
        level = to_level.pre_tokenize_str(word)[0][0]
        for length in range(2, len(level) + 1):
            if level[:length] not in tokens:
                tokens.append(level[:length])
                merges.append((level[: length - 1], level[length - 1]))
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _add_specials(backend)
    return backend


def byte_fallback_backend() -> Backend:
    """Like Llama 2's: `▁` for spaces, the first one stripped, bytes that have no token as `<0xE4>`."""
    tokens = [BOS, EOS, PLAIN_ADDED, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlnopstw", "▁a", "▁b", "é"]
    merges = [("▁", "a"), ("▁", "b")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    _add_specials(backend)
    return backend


def pretrained(backend: Backend, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """As `transformers` holds it."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, chat_template=chat_template)


def _add_specials(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    backend.add_tokens([AddedToken(PLAIN_ADDED, special=False, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)])
