"""Models that read a prompt right in one forward pass only."""

from transformers import PreTrainedModel

# Their scan of several tokens takes no state to begin with; decode steps of one token do.
_LAYERS = {"FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer"}


def layer_that_begins_anew(model: PreTrainedModel) -> str | None:
    """Return the class of a layer that forgets its state in each pass of several tokens; `None` if a model has none."""
    return next((name for module in model.modules() if (name := type(module).__name__) in _LAYERS), None)
