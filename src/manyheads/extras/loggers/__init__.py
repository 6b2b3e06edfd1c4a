"""Loggers of a run that send its numbers to other programs: Weights & Biases, MLflow, Trackio."""
