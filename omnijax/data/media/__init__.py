"""Encoded media to arrays: pictures, clips, sound. NumPy only, no jax; each decoder is a library's."""
