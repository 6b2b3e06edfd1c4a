"""Extra: inspect."""
