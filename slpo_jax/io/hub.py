"""Whether the Hugging Face hub can be asked; shared by everything that takes hub ids."""

import re
from pathlib import Path

from slpo_jax.errors import UserError, first_line, key_name

TEXTS = ("*.json", "merges.txt", "*.jinja", "README.md")  # config, tokenizer and card
_HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+")


def is_hub_id(text: str) -> bool:
    """Whether a text is written as a hub id: "name" or "owner/name"."""
    return _HUB_ID.fullmatch(text) is not None and not set(text.split("/")) & {".", ".."}


def hub_reachable() -> bool:
    """Whether the hub answers its client, which HF_HUB_OFFLINE, a proxy and HF_ENDPOINT are known to.

    Without a network `datasets` by itself would try again for half a minute.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # the client raises errors of several libraries
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

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except Exception as error:  # as above
        raise UserError(
            f"{key_name(key)}: {hub_id} is no local path, and can't be had from the Hugging Face hub or its cache "
            f"({first_line(error)}); give a local path or check the network"
        ) from error
