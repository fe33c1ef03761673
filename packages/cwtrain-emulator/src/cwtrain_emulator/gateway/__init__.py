"""The OpenAI-compatible endpoint: auth, checks of the request, routing to a replica, the answer."""
