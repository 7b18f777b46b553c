"""From a model to a graph: symbolic tracing, `torch.export`, and what both must keep of the user's program."""
