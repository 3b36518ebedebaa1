"""A tokenizer that needs no training, and a model with it."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from models.tiny_models import COMMON, FAMILIES, random_model


def byte_tokenizer(only_printable: bool = False, without: str = "") -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte, or printable one, and the chat format of the small real model."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*without})
    if only_printable:  # a space and a line's end are the last two
        alphabet = [*map(chr, range(33, 127)), "\u0120", "\u010a"]
    tokens = ["<pad>", "<|im_start|>", "<|im_end|>", *alphabet]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=131_072,
        chat_template="{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
        "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )


def tokenizer_for(
    template: str, special: Sequence[str], end: str, tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a chat template, and its marks: special tokens, which `end` is one of, and others."""
    tokenizer = byte_tokenizer(only_printable=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special], "eos_token": end})
    tokenizer.add_tokens([AddedToken(each, special=False) for each in tokens])
    tokenizer.chat_template = template
    return tokenizer


def model_for(tokenizer: PreTrainedTokenizerFast, context: int, family: str = "llama") -> PreTrainedModel:
    """A random model with the vocabulary of a tokenizer."""
    config = FAMILIES[family]()
    config.vocab_size, config.max_position_embeddings = len(tokenizer), context
    return random_model(config)


def model_in(
    folder: Path, context: int, tokenizer: PreTrainedTokenizerFast | None = None, **generation: object
) -> Path:
    """Save a random model with a tokenizer, by default of bytes."""
    tokenizer = tokenizer or byte_tokenizer()
    sizes = COMMON | {"vocab_size": len(tokenizer), "max_position_embeddings": context}
    random_model(LlamaConfig(**sizes, num_hidden_layers=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | generation))
    return folder
