"""What measurements share."""
