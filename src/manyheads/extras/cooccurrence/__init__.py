"""First embeddings from counts of which tokens occur together."""
