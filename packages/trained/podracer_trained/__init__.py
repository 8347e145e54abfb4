"""Five small trained agents: complete runs at the addresses `trained://NAME`."""
