"""What will this update do to my policy's entropy? Probes for reinforcement learning."""
