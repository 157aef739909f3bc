"""Audio towers: encoders of packed mel frames, each usable on its own, and the frames of a sound."""
