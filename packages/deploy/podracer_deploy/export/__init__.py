"""Export: trained policies as files that programs without podracer run."""
