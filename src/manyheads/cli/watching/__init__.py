"""Display of progress while a command works, and a clean end when it is interrupted."""
