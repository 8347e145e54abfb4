"""What is kept on disk: run directories, checkpoints, metrics; and signals."""
