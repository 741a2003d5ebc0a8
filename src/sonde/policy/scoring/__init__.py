"""From rollouts to scores, derivatives and gradients; the training state stays unchanged."""
