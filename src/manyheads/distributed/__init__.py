"""Several processes as one run: how they start, find each other, share the work, and notice that one is lost."""
