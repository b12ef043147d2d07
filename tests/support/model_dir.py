"""Tiny models on disk, as a service loads them: weights in float64, a tokenizer and a chat template."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared.engine.model_loader import load, wrap
from shared.tokenizer import load_tokenizer
from tests.support.oracle import PlainDecoder
from tests.support.tiny_models import noisy_copy, random_model
from tests.support.tiny_tokenizers import byte_level_backend, pretrained

NUM_ROWS = 320  # of the target's embedding: more than its tokenizer has ids
MAX_MODEL_LEN = 4096
EOS_IDS = frozenset({1, 60, 75, 90, 105, 120, 150, 200, 230, 250, 270, 282})  # many: random texts are to end by themselves


@dataclass(frozen=True)
class ModelDirs:
    """A target and a draft model that is right more often than not."""

    target: Path
    noisy: Path

    def oracle(self) -> PlainDecoder:
        """What plain decoding with the target says."""
        return PlainDecoder(load(str(self.target), "float64"), load_tokenizer(self.target).vocab_size)


def save_models(directory: Path) -> ModelDirs:
    tokenizer = pretrained(byte_level_backend())
    target = random_model("llama", NUM_ROWS, scale_head=16.0)
    noisy = noisy_copy(wrap(random_model("llama", NUM_ROWS, scale_head=16.0), "target"), 0.05, seed=1).model
    return ModelDirs(_save(directory / "target", target, tokenizer, sorted(EOS_IDS)), _save(directory / "noisy", noisy, tokenizer, sorted(EOS_IDS)))


def save_small_vocabulary(directory: Path, num_ids: int, seed: int, scale_head: float) -> Path:
    """A model over `num_ids` letters, whose texts of a few tokens can be enumerated. It never ends a text by itself."""
    backend = Backend(models.WordLevel({chr(ord("a") + index): index for index in range(num_ids)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _save(directory, random_model("llama", num_ids, seed, scale_head=scale_head), PreTrainedTokenizerFast(tokenizer_object=backend), None)


def _save(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, eos_ids: list[int] | None) -> Path:
    model.config.max_position_embeddings = MAX_MODEL_LEN
    model.config.eos_token_id = model.generation_config.eos_token_id = eos_ids
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
