"""From text to rows: sources, tokenizers, packing, the exact stream and held-out rows. NumPy only, no jax."""
