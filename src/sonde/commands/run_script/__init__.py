"""What `sonde run` does inside the script that it measures."""
