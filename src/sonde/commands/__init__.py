"""Commands that measure something of yours: options, input, and what they print."""
