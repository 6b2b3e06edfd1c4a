"""Settings for a run on one's own data."""
