"""Durations as text."""


def duration_text(seconds: float) -> str:
    """Write a duration in seconds, minutes or hours, whichever has few digits."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
