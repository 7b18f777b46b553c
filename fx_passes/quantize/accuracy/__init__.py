"""What int8 costs in accuracy, layer by layer, and which layers should stay float."""
