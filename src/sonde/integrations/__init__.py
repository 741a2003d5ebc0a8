"""One file for each trainer; nothing else of sonde imports them."""
