"""Older places of public names, for one more release."""
