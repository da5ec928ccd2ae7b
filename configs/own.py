"""All four stages on problems of your own: a small GPT-2 from random weights that reads bytes.

`--config.data.train=FILE`, `.valid` and `.eval.NAME` say where they are; a line of a .jsonl file is
`{"question": "Tom has 5 apples. He buys 3. How many now?", "steps": ["5 + 3 = 8"], "answer": "8"}`.
A longer question than the last of `prompt_slots` is named, in bytes; the step counts are small.
"""

from slpo_jax.config import default_config
from slpo_jax.run.presets import small_gpt2


def get_config():
    config = default_config()
    config.tokenizer = "bytes"
    small_gpt2(config, n_positions=1024)
    config.prompt_slots = (96, 192, 448)
    config.max_answer_tokens = 16
    config.data.train = "my_train.jsonl"
    config.data.valid = "my_valid.jsonl"
    config.data.eval.mine = "my_test.jsonl"
    return config
