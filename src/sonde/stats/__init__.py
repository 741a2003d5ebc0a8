"""Equations: numbers and small tensors in, frozen dataclasses out. Nothing here knows of hooks, ranks or steps."""
