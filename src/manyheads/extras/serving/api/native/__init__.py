"""Our own protocol: translation, generation, scoring and attention, one file each."""
