"""Access to files that may come from somebody else: a run folder, a model folder, a file that was downloaded."""
