"""Engines: what turns a materialised checkpoint into tokens and log-probs."""
