"""Tiny AdaLR checkpoints as its program writes them, and what that program says with them.

The folders are written by numpy and safetensors alone. `ORACLE` holds what the published program
(apning/adaptive-latent-reasoning at 4e7d7dd, with transformers 4.53.0 and torch 2.13 on a CPU, in float32) makes of
these very folders, by its `LatentThinkingModel`. `python tests/adalr_files.py PROGRAM`, in an environment with those,
writes it again, PROGRAM being a checkout of that program.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ORACLE = Path(__file__).parent / "golden" / "adalr.npz"
WIDTH, INNER, POSITIONS, MOST, BUDGET = 16, 24, 64, 5, 6
EOS, START, END, CONTINUE, STOP, ROWS = 256, 257, 258, 259, 260, 264  # three rows pad the tables, as there
SPECIAL = ["<|endoftext|>", "<START>", "<END>", "<|CONTINUE|>", "<|STOP|>"]
QUESTIONS = ["2 + 3", "Tom has 3 pens. How many?", "Why?", "A", "x", "7 * 8 =", "Ben", "  Ann's 12", "ab", "Sum"]
GIVEN = [50, 32, 43, 32, 51, START, CONTINUE, CONTINUE, STOP, 32, 84, 104, 101, EOS]
"""A text with two latents, of which all logits are compared."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of checkpoint: `lora` has the tokens' rows beside the model, `temperature` is the binary head's.

    The seed is one of which thoughts have several lengths.
    """

    backbone: str
    tied: bool
    lora: bool
    seed: int
    temperature: float | None = None

    @property
    def name(self) -> str:
        return f"{self.backbone}_{'tied' if self.tied else 'untied'}_{'lora' if self.lora else 'merged'}"


CASES = [
    Case("gpt2", True, True, 4),
    Case("gpt2", True, False, 7, 2.0),
    Case("llama", True, True, 3),
    Case("llama", False, True, 3),
    Case("llama", False, False, 4),
]


def _model(case: Case, rng: np.random.Generator) -> tuple[dict, dict[str, np.ndarray]]:
    """The language model's config.json and tensors."""

    def weights(shape):
        return rng.normal(size=shape) * (0.4 if shape[0] in (ROWS, POSITIONS) else 1.1 / np.sqrt(shape[-1]))

    if case.backbone == "gpt2":
        config = dict(n_positions=POSITIONS, n_embd=WIDTH, n_layer=2, n_head=2)
        table = "transformer.wte.weight"
        shapes = {table: (ROWS, WIDTH), "transformer.wpe.weight": (POSITIONS, WIDTH)}
        block = {
            "attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH),
            "mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH),
        }  # fmt: skip
        for layer in range(2):
            for name, shape in block.items():
                shapes[f"transformer.h.{layer}.{name}.weight"] = shape
                shapes[f"transformer.h.{layer}.{name}.bias"] = shape[1:]
            for name in ("ln_1", "ln_2"):
                shapes[f"transformer.h.{layer}.{name}.weight"] = (WIDTH,)
                shapes[f"transformer.h.{layer}.{name}.bias"] = (WIDTH,)
        shapes["transformer.ln_f.weight"] = (WIDTH,)
        shapes["transformer.ln_f.bias"] = (WIDTH,)
    else:
        config = dict(
            hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=POSITIONS, rms_norm_eps=1e-5, rope_theta=10000.0,
        )  # fmt: skip
        table = "model.embed_tokens.weight"
        shapes = {table: (ROWS, WIDTH)}
        block = {
            "self_attn.q_proj": (32, WIDTH), "self_attn.k_proj": (16, WIDTH), "self_attn.v_proj": (16, WIDTH),
            "self_attn.o_proj": (WIDTH, 32), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
        }  # fmt: skip
        for layer in range(2):
            for name, shape in block.items():
                shapes[f"model.layers.{layer}.{name}.weight"] = shape
        shapes["model.norm.weight"] = (WIDTH,)
        if not case.tied:
            shapes["lm_head.weight"] = (ROWS, WIDTH)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            tensors[name] = weights(shape)
        else:
            tensors[name] = 0.1 * rng.normal(size=shape) + name.endswith("weight")
    config |= dict(
        architectures=["LatentThinkingModel"], model_type=case.backbone, vocab_size=ROWS, tie_word_embeddings=case.tied,
        bos_token_id=EOS, eos_token_id=EOS, torch_dtype="float32",
    )  # fmt: skip
    return config, tensors


def published(folder: Path, case: Case, **settings) -> dict[str, np.ndarray]:
    """Write a folder, with other settings of its program; its tensors are returned."""
    rng = np.random.default_rng([case.seed, *case.name.encode()])
    config, model = _model(case, rng)
    table = "transformer.wte.weight" if case.backbone == "gpt2" else "model.embed_tokens.weight"
    head = table if case.tied else "lm_head.weight"
    # The binary head is near a tie, so that thoughts have several lengths. Some answers end, and none starts to think.
    model[head][STOP] = model[head][CONTINUE] + 0.6 * rng.normal(size=WIDTH)
    model[head][EOS] *= 1.8
    if not case.tied:
        model[head][START] *= 0.1
    tensors = {f"_base_model.{name}": array for name, array in model.items()}
    for layer in ("input_layer", "output_layer"):
        tensors[f"recurrent_filter.{layer}.weight"] = rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)
        tensors[f"recurrent_filter.{layer}.bias"] = 0.1 * rng.normal(size=WIDTH)
    tensors["recurrent_filter.norm.weight"] = 0.4 + 0.1 * rng.normal(size=WIDTH)
    tensors["recurrent_filter.norm.bias"] = 0.1 * rng.normal(size=WIDTH)
    if case.lora:
        rows = {"start": START, "end": END, "continue": CONTINUE, "stop": STOP}
        if case.tied:
            places = {f"_{name}_embed": (table, rows[name]) for name in rows}
        else:
            places = {f"_{name}_embed_in": (table, rows[name]) for name in ("start", "end")}
            places |= {f"_{name}_embed_out": (head, rows[name]) for name in ("start", "continue", "stop")}
        for name, (of, row) in places.items():
            tensors[f"{name}.weight"] = tensors[f"_base_model.{of}"][row][None].copy()
            tensors[f"_base_model.{of}"][row] = 0
    config["_inserted_LatentThinkingModelSettings"] = {
        "disable_forward_input_embeds": True, "disable_input_past_key_values": False,
        "disable_checkpointing_cache_update": True, "add_latent_to_end": False, "start_token_id": START,
        "continue_token_id": CONTINUE, "end_token_id": END, "stop_token_id": STOP, "recurrent_filter_mode": "MLP",
        "detach_binary_head_inputs": False, "lora_mode": case.lora, "binary_head_temp": case.temperature,
        "debug_mode": False, "unused_token_ids": [261, 262, 263],
    } | settings  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    texts().save_pretrained(folder)
    return tensors


def texts():
    """A tokenizer whose tokens are bytes, by their order in byte-level BPE's alphabet, and the special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])


def _ask_the_program(folder: Path, case: Case) -> dict[str, np.ndarray]:
    """Return what the published program says: `GIVEN`'s logits, and of each question latents, answer and its choices.

    A thought of `MOST` latents is cut, as ours is, by a second call with its end given.
    """
    import torch
    from src.modeling import LatentThinkingModel

    published(folder, case)
    model, tokenizer = LatentThinkingModel.from_pretrained(folder).eval().requires_grad_(False), texts()
    out = {}
    with torch.inference_mode():
        out["logits"] = model(input_ids=torch.tensor([GIVEN])).logits[0].numpy()
        latents, answers = [], []
        for question in QUESTIONS:
            prompt = [*tokenizer(question)["input_ids"], START]
            options = dict(do_sample=False, num_beams=1, pad_token_id=EOS, eos_token_id=EOS)

            def generate(ids, number, options=options):
                ids = torch.tensor([ids])
                made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=number, **options)
                return made[0, ids.shape[1] :].tolist()

            thought = generate(prompt, MOST)
            number = thought.index(STOP) if STOP in thought else MOST
            assert thought[:number] == [CONTINUE] * number
            answer = generate([*prompt, *thought[:number], STOP], BUDGET)
            assert START not in answer
            latents.append(number)
            answers.append(answer + [EOS] * (BUDGET - len(answer)))
        out["latents"] = np.array(latents)
        out["answers"] = np.array(answers)
    return out


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, sys.argv[1])
    values = {}
    for kind in CASES:
        said = _ask_the_program(Path(tempfile.mkdtemp()) / "adalr", kind)
        print(kind.name, said["latents"].tolist())
        values |= {f"{kind.name}.{name}": array for name, array in said.items()}
    np.savez_compressed(ORACLE, **values)
