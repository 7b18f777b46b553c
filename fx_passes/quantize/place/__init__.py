"""Where quantization goes, for each target, as data with reasons."""
