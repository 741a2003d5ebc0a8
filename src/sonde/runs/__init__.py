"""What a run leaves behind: how its log is read back, and the report on it."""
