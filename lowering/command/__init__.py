"""The command `fxtrt`."""
