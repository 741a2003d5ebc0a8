"""`sonde demo entropy`: a tiny language model learns to add by GRPO, while its entropy is forecast and measured."""
