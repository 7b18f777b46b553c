"""Fewer operations of the same value: BatchNorm folded, computed weights resolved, inert layers removed."""
