"""CODI on a few sums, with a byte-level tokenizer made here, and a run's config of it: no file or hub is needed."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slpo_jax.config import default_config
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.training.recipes import ImitateSettings, Phase
from slpo_jax.training.recipes.distil import Distillation

EOS = "<|endoftext|>"
SUMS = [(a, b) for a in range(1, 8) for b in range(1, 8)]
QUESTION = "Tom has {} pens and buys {}. How many?"
ROWS = (
    ("Tom has 5 pens.", ("<<5+2=7>>", "<<7-1=6>>", "<<6*2=12>>"), "12"),
    ("How many? ", ("<<1+2=3>>",), "3"),
    ("Buys 3  and 4 pens.", ("<<3+4=7>>", "<<7*20=140>>"), "140"),
    ("Tom buys 9.", (), "9.5"),
)
PROBLEMS = tuple(Problem(*row) for row in ROWS)
WAY = Distillation(teacher_factor=0.7, distil_factor=3.0)
RECIPE = WAY(ImitateSettings())
PHASE = Phase("codi", 0, 9, None, None, 3)


def write_tokenizer(folder: Path, digits: bool) -> None:
    """A small byte-level BPE; with `digits` each digit, and the blank before it, is a token of its own, as Llama-3's.

    Without, " 72" is one token, as GPT-2's.
    """
    backend = Tokenizer(models.BPE())
    parts = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if digits:
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        QUESTION.format(a, b) + f" <<{a}+{b}={a + b}>> The answer is: {a + b}"
        for a, b in SUMS
    ]
    backend.train_from_iterator(texts * 3, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def new_tokenizer(tmp_path_factory, digits: bool):
    """A tokenizer of either kind, without a reasoner's tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "files"
    write_tokenizer(folder, digits)
    return load_tokenizer(str(folder))


def write_sums(path: Path, sums) -> None:
    rows = [
        {
            "question": QUESTION.format(a, b),
            "steps": [f"<<{a}+0={a}>>", f"<<{a}+{b}={a + b}>>"],
            "answer": str(a + b),
        }
        for a, b in sums
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def small_config(folder: Path):
    """Imitation and evaluation of `codi_gpt2`; the folder gets what they read."""
    if not (folder / "tokenizer").exists():
        write_tokenizer(folder / "tokenizer", digits=False)
        write_sums(folder / "train.jsonl", SUMS[:36])
        write_sums(folder / "valid.jsonl", SUMS[36:40])
        write_sums(folder / "test.jsonl", SUMS[40:])
    config = default_config()
    config.reasoner = "codi_gpt2"
    config.tokenizer = str(folder / "tokenizer")
    config.model.update(n_layer=1, n_head=2, n_embd=16, n_positions=64)
    config.stages = ("imitate", "evaluate")
    config.gate.enabled = False
    config.max_latents = 2
    config.min_latents = 1
    config.max_answer_tokens = 8
    config.prompt_slots = (32,)
    config.data.update(
        train=str(folder / "train.jsonl"), valid=str(folder / "valid.jsonl")
    )
    config.data.eval.sums = str(folder / "test.jsonl")
    config.imitate.update(
        batch_size=4, c_thought=1, max_latent_stage=2, cot_steps=3, final_steps=6
    )
    config.imitate.optimizer.update(learning_rate=1e-2)
    config.evaluate.update(batch_size=16, limit=3, samples=2, seeds=1)
    config.log_every = 1
    config.checkpoint_every = 2
    return config
