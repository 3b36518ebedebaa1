"""Functions that `torch.compile` does not trace: it compiles the model around them."""

import torch

outside_of_graphs = torch.compiler.disable(
    reason="keys and values are stored, and attended to, outside of compiled graphs; compile without fullgraph=True"
)
