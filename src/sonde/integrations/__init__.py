"""One or two files for each trainer; no probe imports them."""
