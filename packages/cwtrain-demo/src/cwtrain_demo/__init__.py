"""The quick start: train a small model against the emulator, weights hot-loaded after every step."""
