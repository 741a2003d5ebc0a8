"""The rule of a batch schedule, on numbers alone."""
