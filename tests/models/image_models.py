"""A tiny model of text and images, and a prompt with a picture for it."""

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration


def model_of_images() -> PreTrainedModel:
    """Make a model whose positions go on from the images of the prompt before."""
    torch.manual_seed(0)
    rotation = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "rope_parameters": rotation, **heads}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    tokens = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 8
    return model


def prompt_with_picture() -> dict[str, Any]:
    """Make the inputs of a prompt of 30 tokens, 16 of which stand for a picture and take 4 positions."""
    ids = torch.arange(5, 35)[None]
    ids[0, 4], ids[0, 5:21], ids[0, 21] = 122, 120, 123
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 120).int(),
        "pixel_values": torch.randn(64, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    }
