"""A batch size that follows the noise scale: the one part of sonde that changes training."""
