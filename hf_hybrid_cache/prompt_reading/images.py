"""Forgetting the images of the prompt before, from which some models count positions on."""

from transformers import PreTrainedModel


def forget_images(model: PreTrainedModel) -> None:
    """Let a model count positions from 0, as `generate` does for a new prompt, not on from the images of the last."""
    for module in model.modules():
        if "rope_deltas" in vars(module):
            module.rope_deltas = None  # type: ignore[assignment]
