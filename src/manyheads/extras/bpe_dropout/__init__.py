"""Other segmentations of the training pairs in each epoch."""
