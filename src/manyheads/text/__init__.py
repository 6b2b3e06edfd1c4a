"""Text to ids and back; knows no tensors."""
