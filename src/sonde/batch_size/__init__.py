"""Is my batch size right? The gradient noise scale, measured while a run trains."""
