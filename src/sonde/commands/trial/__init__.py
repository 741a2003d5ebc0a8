"""Trials of `sonde advise --try`: a script trains for a few seconds at each of some sizes, and its steps are timed."""
