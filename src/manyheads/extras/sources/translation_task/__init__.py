"""The modules of the task `translation` with the options of this extra."""
