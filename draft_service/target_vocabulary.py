"""A target's embedding and head, which a speculator may share. It knows no speculator."""

from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from shared.default_model import resolve
from shared.errors import UnsupportedModel


def vocabulary_of(target: str) -> tuple[Tensor, Tensor]:
    """Embedding and head, [vocab_size, hidden_size] each, in the number type in which they are stored.

    Args:
        target: hub id, directory or alias.

    Raises:
        UnsupportedModel: they cannot be read.
    """
    directory = resolve(target)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", use_safetensors=True, trust_remote_code=False)
        embedding: Tensor = model.get_input_embeddings().weight
        head: Tensor = model.get_output_embeddings().weight
    except Exception as error:  # whatever foreign code raises, the operator gets one sentence
        raise UnsupportedModel(f"{target}: its embedding and head cannot be read: {str(error).splitlines()[0]}") from error
    return embedding.detach(), head.detach()
