"""A tokenizer that needs no training, and a model with it."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from models.tiny_models import COMMON


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


def model_in(
    folder: Path, context: int, tokenizer: PreTrainedTokenizerFast | None = None, **generation: object
) -> Path:
    """Save a random model with a tokenizer, by default of bytes."""
    torch.manual_seed(0)
    tokenizer = tokenizer or byte_tokenizer()
    sizes = COMMON | {"vocab_size": len(tokenizer), "max_position_embeddings": context}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=2)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | generation))
    return folder
