"""Equations of a policy's entropy: numbers in, frozen dataclasses out. Nothing here knows models, ranks or steps."""
