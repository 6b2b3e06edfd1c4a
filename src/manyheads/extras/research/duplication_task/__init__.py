"""The duplication task of the Reformer paper: 0w0w."""
