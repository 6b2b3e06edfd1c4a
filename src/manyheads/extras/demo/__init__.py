"""The second half of `make demo`: what a run has learned."""
