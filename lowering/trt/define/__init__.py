"""From an aten program to a TensorRT network definition."""
