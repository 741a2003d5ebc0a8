"""What to do next with the batch size: one decision from one log or several, its reason and its next command."""
