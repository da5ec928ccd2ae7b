"""All four stages on problems of your own, with settings that are chosen from them and shown.

`slpo train --train=FILE [--valid=FILE] [--test=FILE] [--base=MODEL]` is this config; without a base model it is a small
GPT-2 from random weights that reads the data's words where they are few, else bytes. A line of a .jsonl file is
`{"question": "Tom has 5 apples. He buys 3. How many now?", "steps": ["5 + 3 = 8"], "answer": "8"}`.
"""

import sys

from slpo_jax.config import default_config
from slpo_jax.run.derived import derived_settings


def get_config(train: str = "synthetic:train"):
    config = default_config()
    if train:  # else the command chooses once it has read its flags, which go first
        config.data.train = train
        print("\n".join(derived_settings(config)), file=sys.stderr)
    return config
