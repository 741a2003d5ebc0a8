"""Runs that are being written: their logs are followed, and shown in the terminal or on a page."""
