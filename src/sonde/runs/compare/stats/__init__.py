"""How the numbers of two runs differ, with intervals."""
