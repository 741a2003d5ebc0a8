"""From rollouts to scores, derivatives and gradients; the training state is left as it was."""
