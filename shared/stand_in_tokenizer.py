"""The tokenizer of the stand-in for a model: every byte is a token. It knows no merges, and no model."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from shared.simulation import FIRST_BYTE_ID
from shared.tokenizer import Tokenizer, byte_alphabet

_SPECIALS = ("<begin>", "<end>")
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def stand_in_tokenizer() -> Tokenizer:
    """A byte's id is `FIRST_BYTE_ID` + the byte."""
    bytes_ = {character: FIRST_BYTE_ID + byte for character, byte in byte_alphabet().items()}
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(_SPECIALS)} | bytes_, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIALS])
    pretrained = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_SPECIALS[1], chat_template=_CHAT_TEMPLATE)  # type: ignore[no-untyped-call]
    return Tokenizer(pretrained)
