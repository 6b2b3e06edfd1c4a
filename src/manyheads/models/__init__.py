"""The models: one folder for each architecture, the composites of body and head, and the table of all."""
