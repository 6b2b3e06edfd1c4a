"""Access to files of possibly external origin: a run folder, a model folder, a file that was downloaded."""
