"""The output of a run: metrics, log, reports, plots."""
