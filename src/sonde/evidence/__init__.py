"""What a noise scale is worth: critical batch sizes that are measured directly, and the noise scale with curvature."""
