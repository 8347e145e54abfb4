"""Back-tests of trained trading policies, baselines, and delivery of models."""
