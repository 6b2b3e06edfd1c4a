"""Extra: translation."""
