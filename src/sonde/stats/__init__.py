"""Equations that two questions need: intervals, and checks of saved states."""
