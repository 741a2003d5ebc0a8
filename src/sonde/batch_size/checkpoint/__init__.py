"""A measurement at fixed weights: its batches, its ranks, the model that it leaves as it is, and its result."""
