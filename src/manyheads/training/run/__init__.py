"""The training loop and its parts: model, optimiser, step, checkpoints, clock, validation."""
