"""What can be learned: one folder for each task, and the table of all tasks."""
