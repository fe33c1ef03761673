"""Exact rollout samples (token ids and log-probs) from an OpenAI-compatible endpoint."""
