"""Equations of critical batch sizes. They take numbers, and know nothing of models, scripts or ranks."""
