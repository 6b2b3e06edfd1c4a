"""Extra: classification."""
