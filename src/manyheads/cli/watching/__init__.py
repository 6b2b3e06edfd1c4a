"""Progress shown while a command works, and an orderly end when it is interrupted."""
