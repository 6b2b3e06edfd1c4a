"""Our own protocol: translation, generation, scoring and attention."""
