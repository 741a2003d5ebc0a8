"""Small trainings that run anywhere and show what sonde measures."""
