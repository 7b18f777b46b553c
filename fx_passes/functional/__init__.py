"""Graphs without in-place operations."""
