"""What a file is that is not what its name says."""

from __future__ import annotations

SNIFF_BYTES = 512
"""How many first bytes ``describe_content`` wants to see."""

_LFS = (b"version https://git-lfs", b"version http://git-media", b"version https://hawser")
_MAGIC = (
    (b"PK\x03\x04", "is a zip archive (a PyTorch file?); save the checkpoint as safetensors"),
    (b"\x80\x02", "is a Python pickle (a PyTorch file?); save the checkpoint as safetensors"),
    (b"\x80\x04", "is a Python pickle; save the checkpoint as safetensors"),
    (b"GGUF", "is a GGUF file; give the checkpoint in safetensors format"),
    (b"\x1f\x8b", "is gzip-compressed; unpack it"),
    (b"\x28\xb5\x2f\xfd", "is zstd-compressed; unpack it"),
)


def describe_content(first: bytes) -> str | None:
    """Return what a file that starts with ``first`` is and what to do, or None if nothing is recognised."""
    if not first:
        return "is empty (0 bytes); save or download it again"
    if first.startswith(_LFS):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull`"
    if not any(first):
        return "is filled with zeros (written but never stored, as after a crash); save or download it again"
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<body")):
        return "is an HTML page (an error or login page saved by a download?); download it again"
    if text.startswith((b"<?xml", b"<error")):
        return "is an XML document (an error of an object store saved by a download?); download it again"
    for magic, what in _MAGIC:
        if first.startswith(magic):
            return what
    return None
