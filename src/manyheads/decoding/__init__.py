"""From ids to ids: greedy search, beam search, sampling; and from text to text."""
