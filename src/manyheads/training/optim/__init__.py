"""Optimisers, schedules and moving averages of weights."""
