"""Vision towers: encoders of packed patches, each usable on its own."""
