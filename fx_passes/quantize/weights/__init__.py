"""Weights as integers: scales, the limits of hardware, and how they are rounded."""
