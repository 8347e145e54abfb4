"""What a trained trader goes through: back-test, baselines, delivery."""
