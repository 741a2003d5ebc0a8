"""Where the records of a run go: the log on disk, and experiment trackers."""
