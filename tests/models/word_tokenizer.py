"""A tokenizer for texts such as "w1 w2", and a tiny model with it."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.tiny_models import VOCAB_SIZE, tiny_model


def word_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0")


def word_model_in(folder: Path, family: str = "llama") -> Path:
    tiny_model(family).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
