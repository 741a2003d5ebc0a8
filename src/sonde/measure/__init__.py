"""Torch plumbing that reads gradients and never changes them: one file per mechanism."""
