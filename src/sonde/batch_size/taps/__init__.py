"""Read gradients, and never change them: one file for each mechanism."""
