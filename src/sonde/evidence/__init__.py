"""What a noise scale is worth: critical batch sizes that are measured directly, by branches from a checkpoint."""
