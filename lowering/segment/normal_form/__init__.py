"""How `to_aten` brings a segment into its one normal form: torch.export, then small rewrites of the graph."""
