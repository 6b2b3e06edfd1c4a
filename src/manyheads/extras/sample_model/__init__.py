"""Extra: a translator that is part of the package."""
