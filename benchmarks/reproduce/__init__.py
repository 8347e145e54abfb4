"""Published figures beside ours: what they claim, what is run for them, and the verdicts."""
