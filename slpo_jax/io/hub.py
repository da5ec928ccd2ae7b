"""Whether the Hugging Face hub can be asked; shared by everything that takes hub ids."""

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from slpo_jax.errors import UserError, first_line, key_name

TEXTS = ("*.json", "merges.txt", "*.jinja", "README.md")  # config, tokenizer and card
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


def snapshot(hub_id: str, key: str, patterns: tuple[str, ...] = TEXTS) -> Path:
    """The folder of a model's files in the hub's cache, fetched before if the hub can be asked. Code is never fetched.

    Args:
        key: the config's or flag's name, for messages.
        patterns: of the files that are wanted.
    Raises:
        UserError: it can't be had.
    """
    from huggingface_hub import snapshot_download

    reachable = hub_reachable()
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), local_files_only=not reachable))
    except Exception as error:  # the client raises errors of several libraries
        reason = first_line(error) if reachable else "the hub can't be reached"
        raise UserError(
            f"{key_name(key)}: {hub_id} is no local path, and can't be had from the Hugging Face hub or its cache "
            f"({reason}); give a local path or check the network"
        ) from error
