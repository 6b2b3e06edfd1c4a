"""A clock for tests: seconds pass when they say so."""

__all__ = ["Clock"]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
