"""What sonde costs and how exact it is, measured: one module per claim, run by `make bench`."""
