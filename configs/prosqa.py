"""ProsQA as published. prosqa:sentences,DIR on GPT-2; prosqa:graph,DIR, two layers.

`slpo train prosqa:sentences,DIR` (Hao et al., 2024) reads `prosqa_train.json`, `prosqa_valid.json` and
`prosqa_test.json` from DIR (`data` by default), facts in words, into GPT-2 (124M). Their program begins its optimizer
anew at every epoch, this at every stage. `slpo train prosqa:graph,DIR` (Zhu et al., 2025) reads
`prosqa_train_graph_4_coconut.json`, `.._valid_..` and `.._test_..`, edges between numbered nodes, into two layers of
random weights.

Rewards come after either with `--config.stages="('imitate','rl','evaluate')"`. The last checkpoint counts, where both
programs take the best of validation.
"""

from _presets import coconut_imitation
from slpo_jax.config import default_config
from slpo_jax.errors import UserError

SENTENCES = 17_886
GRAPHS = 14_785  # problems to train on


def get_config(which: str = "sentences,data"):
    kind, _, folder = which.partition(",")
    if kind not in ("sentences", "graph"):
        raise UserError(
            f"configs/prosqa.py:{which}: no such model; give sentences or graph, as FILE:MODEL[,DIR]"
        )
    config = default_config()
    folder = folder or "data"
    config.stages = ("imitate", "evaluate")
    config.gate.enabled = False
    config.min_latents = 1
    coconut_imitation(config)
    config.imitate.update(c_thought=1, dropout=0.1)  # GPT-2's own
    config.evaluate.update(batch_size=512, seeds=1)
    (_sentences if kind == "sentences" else _graph)(config, folder)
    return config


def _sentences(config, folder: str) -> None:
    config.init = "openai-community/gpt2"
    config.prompt.answers = "texts"
    config.update(max_latents=6, prompt_slots=(384, 512, 640), max_answer_tokens=16)
    _files(config, f"{folder}/prosqa_{{}}.json")
    epoch = -(-SENTENCES // 128)  # 32 on each of 4 devices
    config.imitate.update(
        max_latent_stage=6,
        cot_steps=5 * epoch,
        stage_steps=5 * epoch,
        final_steps=15 * epoch,
        suffix_slots=(16, 48),
    )


def _graph(config, folder: str) -> None:
    config.tokenizer = "nodes:30"
    config.model.update(n_layer=2, n_head=8, n_embd=768, n_positions=1024)
    config.prompt.update(format="<eos> {question}", closing="[A]")
    config.data.fields.question = "edges"
    config.update(max_latents=4, prompt_slots=(96, 128, 192), max_answer_tokens=2)
    _files(config, f"{folder}/prosqa_{{}}_graph_4_coconut.json")
    batch = 256  # 128 on each of 2 devices
    epoch = -(-GRAPHS // batch)
    config.imitate.update(
        recipe="frontier", batch_size=batch, max_latent_stage=4, cot_steps=25 * epoch, stage_steps=25 * epoch,
        final_steps=175 * epoch, mix=0.1, reset_optimizer=False, suffix_slots=(),
    )  # fmt: skip
    config.evaluate.by_steps = True


def _files(config, name: str) -> None:
    config.data.train = name.format("train")
    config.data.valid = name.format("valid")
    config.data.eval.prosqa = name.format("test")
