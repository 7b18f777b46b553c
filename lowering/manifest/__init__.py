"""What `lowering.artifact` writes and reads: the parts of a manifest, and files that are whole or not there at all."""
