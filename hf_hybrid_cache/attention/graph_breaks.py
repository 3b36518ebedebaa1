"""What `torch.compile` does not look into: the model around it is compiled, in parts."""

import torch

outside_of_graphs = torch.compiler.disable(
    reason="keys and values are stored, and attended to, outside of compiled graphs; compile without fullgraph=True"
)
