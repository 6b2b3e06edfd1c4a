"""The modules of the tasks `text` and `ids` with the options of this extra."""
