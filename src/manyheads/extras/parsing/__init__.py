"""Extra: parsing."""
