"""Whether the Hugging Face hub can be asked; shared by everything that takes hub ids."""

import os
import re
import socket
from urllib.parse import urlsplit

_TRUE = {"1", "ON", "YES", "TRUE"}
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+")


def is_hub_id(text: str) -> bool:
    """Whether a text is written as a hub id: "name" or "owner/name"."""
    return _HUB_ID.fullmatch(text) is not None and not set(text.split("/")) & {".", ".."}


def hub_reachable() -> bool:
    """Whether asking the hub has a point; without a network the clients would retry for most of a minute.

    Returns:
        False where HF_HUB_OFFLINE (or its older names) is set, or the hub's host has no address. A proxy resolves names
        itself, so that behind one the answer is True.
    """
    if any(os.environ.get(name, "").upper() in _TRUE for name in _OFFLINE):
        return False
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
