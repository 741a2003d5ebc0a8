"""Equations of the noise scale: numbers in, frozen dataclasses out. Nothing here knows hooks, ranks or steps."""
