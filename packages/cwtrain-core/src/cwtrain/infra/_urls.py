"""URLs that rollouts use, made from what a gateway says."""

from __future__ import annotations

from cwtrain.errors import ConfigError

__all__ = ["rollout_base_url"]


def rollout_base_url(endpoint: str) -> str:
    """Return the OpenAI-compatible base URL of a gateway's ``endpoint``: with a scheme, ending in ``/v1``.

    >>> rollout_base_url("abc.example.com/")
    'https://abc.example.com/v1'
    """
    url = endpoint.strip()
    if not url:
        raise ConfigError("the endpoint is empty", hint="wait until the gateway is READY; it has no endpoint before")
    if "://" not in url:
        url = f"https://{url}"
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"
