"""What `sonde doctor` looks at."""
