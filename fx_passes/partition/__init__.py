"""Tensor programs between Python calls."""
