"""What a lowering is asked for: the model, its inputs, their sizes, data and settings."""
