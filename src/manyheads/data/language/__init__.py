"""Extra: language."""
