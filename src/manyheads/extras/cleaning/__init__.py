"""Rules that find sentence pairs which are unsuitable for training, and the report of their findings."""
