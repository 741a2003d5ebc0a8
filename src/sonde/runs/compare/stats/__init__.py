"""How the curves of two runs differ at an equal place, with intervals."""
