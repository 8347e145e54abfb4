"""Actions over HTTP: a trained policy answers observations, and follows a directory of models."""
