"""Pytest fixtures of the emulator."""
