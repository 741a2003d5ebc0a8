"""What some users need and others never open: nothing else of sonde imports it, but the integrations."""
