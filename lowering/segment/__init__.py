"""Segments: from a captured graph to tensor programs in one normal form."""
