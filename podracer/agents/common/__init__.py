"""What agents share."""
