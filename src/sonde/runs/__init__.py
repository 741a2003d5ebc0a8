"""What a run leaves behind: where its records go, how they are read back, and the report on them."""
