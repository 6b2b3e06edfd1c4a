"""The modules of the task `text` with the options of this extra."""
