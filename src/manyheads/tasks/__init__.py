"""The tasks that models learn: one folder for each, and the table of all."""
