"""Rules that find sentence pairs which are of no use for training, and the report of what they found."""
