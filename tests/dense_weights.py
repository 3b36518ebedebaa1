"""Models whose weights of few bits are numbers again."""

import copy

from torch import nn
from transformers import PreTrainedModel

from hf_hybrid_cache.weights.coded_weight import CodedWeight


def with_dense_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose weights are the numbers that the codes stand for."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, CodedWeight):
                module._parameters[name] = nn.Parameter(weight.dense())
    return model
