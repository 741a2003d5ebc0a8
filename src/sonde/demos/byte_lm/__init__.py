"""A byte-level language model, trained on Python's own sources on every rank, with its gradient noise scale."""
