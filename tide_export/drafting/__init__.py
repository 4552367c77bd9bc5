"""Trains drafters: small networks that propose the model's next tokens, trained on its answers."""
