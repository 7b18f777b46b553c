"""Running engines on a GPU."""
