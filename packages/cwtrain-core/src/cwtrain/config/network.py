"""What the environment says of the way to a host, read in one way for every client: proxies and CA bundles.

HTTP libraries read ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` each in their own way, and some fail
on what they cannot read, in words of their own. Here an entry of ``NO_PROXY`` that cannot be read is left out, a proxy
that is not used is not looked at, and one that cannot be used is named with its variable. A lower-case name wins, as
everywhere.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from urllib.parse import quote, unquote, urlsplit

import attrs

from cwtrain.errors import ConfigError

__all__ = ["Proxy", "ca_bundles", "hide_user_info", "proxy_for"]

_USER_INFO = re.compile(r"(?<=//)[^/\s]*@")
_SYSTEM = "the system's settings"
_PORTS = {"http": 80, "https": 443}


@attrs.frozen(kw_only=True)
class Proxy:
    """A proxy that can be used. ``repr`` shows neither user nor password."""

    url: str = attrs.field(repr=False)
    """With user and password, escaped."""
    host: str
    source: str
    """The variable that names it, as it is spelled in the environment."""
    _secrets: tuple[str, ...] = attrs.field(default=(), repr=False)

    def hide(self, text: str) -> str:
        """Return ``text`` without the proxy's user and password."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return hide_user_info(text)


def hide_user_info(text: str) -> str:
    """Return ``text`` without what stands before an ``@`` in the URLs in it."""
    return _USER_INFO.sub("***@", text)


def proxy_for(url: str, *, schemes: Sequence[str] = ("http", "https"), all_proxy: bool = True) -> Proxy | None:
    """Return the proxy that ``url`` is to be reached through, None for none.

    ``schemes`` are those of proxies that the client can use; ``all_proxy`` says whether ``ALL_PROXY`` counts. Raises
    ConfigError naming the variable, never its value, for a proxy that cannot be used.
    """
    parts = urlsplit(url)
    scheme, host = parts.scheme, (parts.hostname or "").rstrip(".")
    if _excluded(host, parts.port or _PORTS.get(scheme)):
        return None
    for name in (f"{scheme}_proxy", "all_proxy") if all_proxy else (f"{scheme}_proxy",):
        found = _variable(name)
        if found is not None:
            return _read(*found, host=host, schemes=schemes)
    if sys.platform in ("darwin", "win32") and not any(name.lower().endswith("_proxy") for name in os.environ):
        value = urllib.request.getproxies().get(scheme)
        if value and not urllib.request.proxy_bypass(host):
            return _read(_SYSTEM, value, host=host, schemes=schemes)
    return None


def ca_bundles() -> tuple[str, list[str]]:
    """Return the variable that names CA bundles, and the files or folders of it that are there; ("", []) without one.

    ``SSL_CERT_FILE`` wins over ``SSL_CERT_DIR``. Raises ConfigError where it names nothing that is there: TLS libraries
    either fail in words of their own, or trust nobody without saying why.
    """
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        if text := os.environ.get(variable, "").strip():
            named = text.split(os.pathsep) if variable == "SSL_CERT_DIR" else [text]
            there = [path for path in named if os.path.exists(path)]
            if not there:
                raise ConfigError(
                    f"{variable}={text!r} names nothing that is there",
                    hint="give the path of a PEM file (SSL_CERT_FILE) or of a folder (SSL_CERT_DIR) with certificates, "
                    "or unset it",
                )
            return variable, there
    return "", []


def _variable(name: str) -> tuple[str, str] | None:
    """Return (spelling, value) of a variable, in any case; a blank one in lower case says that there is none."""
    spelled = {key: value.strip() for key, value in os.environ.items() if key.lower() == name}
    if name == "http_proxy" and "REQUEST_METHOD" in os.environ:
        spelled = {key: value for key, value in spelled.items() if key == name}  # a header "Proxy:" sets HTTP_PROXY
    if name in spelled:
        spelled = {name: spelled[name]}
    return next(((key, value) for key, value in spelled.items() if value), None)


def _read(variable: str, text: str, *, host: str, schemes: Sequence[str]) -> Proxy:
    def refused(what: str, hint: str = "") -> ConfigError:
        return ConfigError(
            f"{variable} cannot be used as the proxy for {host}: {what}",
            hint=f"{hint or f'correct {variable}, such as http://proxy.example.com:3128'}, or name {host} in NO_PROXY",
        )

    if any(char.isspace() or not char.isprintable() for char in text):
        raise refused("it holds a blank, a line end or a control character")
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        name = parts.hostname or ""
        name.encode("idna")
    except ValueError:  # its text may hold the password
        raise refused("it is no URL") from None
    try:
        port = parts.port
    except ValueError:
        raise refused("its port is no number from 0 to 65535") from None
    if parts.scheme not in schemes:
        socks = parts.scheme.startswith("socks")
        raise refused(
            "this client cannot use a SOCKS proxy" if socks else f"its scheme is none of {', '.join(schemes)}",
            "install the package socksio (pip install 'httpx[socks]': for calls of the API), name an http:// proxy"
            if socks
            else "",
        )
    if not name:
        raise refused("it names no host")
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    quoted = [quote(unquote(word), safe="") for word in (user, password)]
    login = f"{quoted[0]}{colon}{quoted[1]}@" if "@" in parts.netloc else ""
    place = f"[{name}]" if ":" in name else name
    secrets = {word for word in (password, quoted[1], unquote(password)) if len(word) > 3}
    return Proxy(
        url=f"{parts.scheme}://{login}{place}" + (f":{port}" if port is not None else ""),
        host=name,
        source=variable,
        secrets=tuple(sorted(secrets, key=len, reverse=True)),
    )


def _excluded(host: str, port: int | None) -> bool:
    """Return whether ``NO_PROXY`` names the host: by name, domain, address or range, each with a port or without."""
    found = _variable("no_proxy")
    return found is not None and any(_names(item, host.lower(), port) for item in re.split(r"[,\s]+", found[1]) if item)


def _names(item: str, host: str, port: int | None) -> bool:
    item = item.lower().rpartition("://")[2].rstrip("/")
    if item == "*":
        return True
    wanted = None
    if (found := re.fullmatch(r"\[(.+)\](/\d+)?(?::(\d+))?", item)) is not None:
        item, wanted = found[1] + (found[2] or ""), found[3]
    elif (found := re.fullmatch(r"([^:]*):(\d+)", item)) is not None:
        item, wanted = found[1], found[2]
    if wanted is not None and int(wanted) != port:
        return False
    if (network := _network(item)) is not None:
        address = _address(host)
        return address is not None and address.version == network.version and address in network
    name = item.removeprefix("*").lstrip(".").rstrip(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text.partition("%")[0], strict=False)
    except ValueError:
        return None
