"""More pieces for a tokenizer that a model already has."""
