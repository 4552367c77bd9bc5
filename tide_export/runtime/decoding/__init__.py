"""From logits to tokens: sampling, drafting and verifying, the generation loop, statistics."""
