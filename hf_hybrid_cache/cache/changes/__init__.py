"""Changes: going back, choosing sequences, moving to a device."""
