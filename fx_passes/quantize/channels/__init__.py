"""Channels made alike before they share a range, and what a layer's mean loses."""
