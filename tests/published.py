"""Tiny latent reasoners in the layouts in which real ones are published, and a slow decoder of each.

The files are written by transformers, peft, torch and safetensors alone, from modules built as the original programs
build theirs. The decoder runs transformers' model on one unpadded row at a time, every step a fresh full forward.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

torch = pytest.importorskip("torch")
import safetensors.torch  # noqa: E402 - needs torch

LATENTS = 6
BUDGET = 12
WIDTH = 16
START = "<|start-latent|>"
END = "<|end-latent|>"
LATENT = "<|latent|>"
QUESTIONS = [
    "Tom has 3 pens. He buys 4. How many now?",
    " Ann's 12 eggs cost $1.50  each; what do  they cost? ",
    "How many  legs do 7 cats have?  ",
    "Zoë eats ½ of 8 crêpes. How many are left?",
    "2+2?",
    "   A train goes 60 km in an hour.   How far does it go in 2 hours and  30 minutes?",
    "数字 5 and 9\nhave what sum?",
    "Ben sold 48 clips in April, and half as many in May. How many clips  in all? \n",
]
_CORPUS = [
    *QUESTIONS,
    "<<3+4=7>>\n### 7",
    "<<12*1.5=18>>",
    "The answer is: 18",
    "He buys 4 pens and eats 12 eggs.",
]


@functools.cache
def _bpe() -> str:
    """A byte-level BPE, in which "<<" is one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend.to_str()


def tokenizer(backbone: str) -> PreTrainedTokenizerFast:
    """GPT-2's kind has one special token; Llama's has two, and puts the first before every text."""
    backend = Tokenizer.from_str(_bpe())
    if backbone == "gpt2":
        backend.add_special_tokens(["<|endoftext|>"])
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
        return PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    bos = "<|begin_of_text|>"
    eos = "<|end_of_text|>"
    backend.add_special_tokens([bos, eos])
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos
    )


def random_model(backbone: str, rows: int, seed: int = 0, **changes):
    """transformers' model with random weights in which everything matters: norms and biases too."""
    if backbone == "gpt2":
        sizes = dict(
            vocab_size=rows, n_positions=96, n_embd=WIDTH, n_layer=2, n_head=2, n_inner=40, bos_token_id=320,
            eos_token_id=320,
        )  # fmt: skip
        config = transformers.GPT2Config(**sizes | changes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = dict(
            vocab_size=rows, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=96, rms_norm_eps=1e-5, tie_word_embeddings=True,
        )  # fmt: skip
        config = transformers.AutoConfig.for_model(backbone, **sizes | changes)
        model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    return model.eval()


def randomise(module, seed: int) -> None:
    """Redraw all parameters."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            values = rng.normal(size=tuple(weight.shape))
            if weight.ndim == 1:
                values = 0.1 * values + (name.endswith("weight"))
            elif any(
                part in name for part in ("wte", "wpe", "embed_tokens", "lm_head")
            ):
                values *= 0.4
            elif "lora" in name:
                values *= 0.2
            else:
                values *= 1.1 / np.sqrt(WIDTH)
            weight.copy_(torch.tensor(values))


def projector(seed: int = 7, last: str = "ln"):
    """CODI's, as its program builds it; in Hugging Face's layout the last layer is called 4."""
    nn = torch.nn
    hidden = 20
    layers = nn.Sequential(
        nn.Dropout(0.0), nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)
    )
    layers.add_module(last, nn.LayerNorm(WIDTH))
    randomise(layers, seed)
    return layers.eval()


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
    """A checkpoint, and what the program that wrote it does with it.

    Attributes:
        settings: the config's keys.
        model: transformers' model, all adapters merged.
        start, end: ids.
        text: question -> text of the prompt.
        transition: torch's, from the last hidden state to the next input.
        banned: ids that can't be generated.
    """

    settings: dict[str, object]
    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerFast
    start: int
    end: int
    text: Callable[[str], str]
    transition: Callable = dataclasses.field(default_factory=torch.nn.Identity)
    banned: tuple[int, ...] = ()

    @property
    def eos(self) -> int:
        return self.tokenizer.eos_token_id

    def prompt(self, question: str) -> list[int]:
        return [*self.tokenizer(self.text(question))["input_ids"], self.start]

    def decode(self, question: str) -> tuple[list[int], np.ndarray]:
        """(greedy tokens up to and including eos, the latents fed [6, D]) of one question."""
        tokens: list[int] = []
        with torch.no_grad():
            embed = self.model.get_input_embeddings()
            inputs = embed(torch.tensor(self.prompt(question)))
            latents = []
            for _ in range(LATENTS):
                latents.append(self.transition(self._forward(inputs)[0][-1]))
                inputs = torch.cat([inputs, latents[-1][None]])
            while len(tokens) < BUDGET and self.eos not in tokens:
                inputs = torch.cat(
                    [inputs, embed(torch.tensor([tokens[-1] if tokens else self.end]))]
                )
                logits = self._forward(inputs)[1][-1]
                logits[list(self.banned)] = -torch.inf
                tokens.append(int(logits.argmax()))
        return tokens, torch.stack(latents).numpy()

    def preference(
        self, question: str, tokens: list[int], one: int, other: int
    ) -> float:
        """By how much the logits after these answer tokens are for `one` and not the `other`."""
        with torch.no_grad():
            embed = self.model.get_input_embeddings()
            latents = torch.tensor(self.decode(question)[1])
            inputs = torch.cat(
                [
                    embed(torch.tensor(self.prompt(question))),
                    latents,
                    embed(torch.tensor([self.end, *tokens])),
                ]
            )
            logits = self._forward(inputs)[1][-1]
        return float(logits[one] - logits[other])

    def _forward(self, inputs_LD):
        """(hidden states after the final norm [L, D], logits [L, V])."""
        out = self.model(
            inputs_embeds=inputs_LD[None], output_hidden_states=True, use_cache=False
        )
        hidden = out.hidden_states[-1]
        torch.testing.assert_close(
            self.model.get_output_embeddings()(hidden), out.logits
        )
        return hidden[0], out.logits[0]


@functools.cache
def answers(case: Published) -> list[tuple[list[int], np.ndarray]]:
    """`decode` of all questions."""
    return [case.decode(question) for question in QUESTIONS]


def enliven(case: Published, *others, end: bool = True) -> Published:
    """Let the end marker and then eos win where another token did, in the case's model and others with its weights.

    So some answers end early, some don't, and it matters whether the end marker can be generated.
    """
    for token in (case.end, case.eos) if end else (case.eos,):
        decoded = [case.decode(question)[0] for question in QUESTIONS]
        later = [
            found
            for answer in decoded
            for found in set(answer[1:]) - {answer[0], case.end, case.eos}
        ]
        like = max(sorted(set(later)), key=later.count)
        with torch.no_grad():
            for model in (case.model, *others):
                for table in (
                    model.get_input_embeddings().weight,
                    model.get_output_embeddings().weight,
                ):
                    table[token] = 1.05 * table[like]
    return case


def line(question: str) -> str:
    return question + "\n"


def _tidy(question: str) -> str:
    return question.strip().replace("  ", " ")


def coconut_hugging_face(folder: Path, kind: str = "safetensors") -> Published:
    """GPT-2 with three tokens more, in an order of its own; `kind` is "safetensors", "sharded" or "bin"."""
    texts = tokenizer("gpt2")
    plain = len(tokenizer("gpt2"))
    texts.add_special_tokens({"additional_special_tokens": [LATENT, START, END]})
    model = random_model("gpt2", plain + 3, seed=1)
    ids = dict(
        zip(
            ("latent_id", "latent_start_id", "latent_end_id"),
            range(plain, plain + 3),
            strict=True,
        )
    )
    model.config.update(ids)
    settings = {"init": str(folder), "reasoner": "coconut_gpt2"}
    case = enliven(Published(settings, model, texts, plain + 1, plain + 2, line))
    texts.save_pretrained(folder)
    if kind == "bin":
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(
            folder, max_shard_size="8KB" if kind == "sharded" else "1GB"
        )
    return case


def _save_base(folder: Path, model, rows: int, texts: PreTrainedTokenizerFast) -> str:
    """What a state dict needs of its base model: config and tokenizer."""
    config = copy.deepcopy(model.config)
    config.vocab_size = rows
    config.save_pretrained(folder / "base")
    texts.save_pretrained(folder / "base")
    return str(folder / "base")


def coconut_original(
    folder: Path, backbone: str, safe: bool = False, padding: int = 0
) -> Published:
    """The state dict of a module that holds the model and, once more, its embedding.

    Args:
        safe: safetensors, which keep one of tied tensors.
        padding: rows of the base model's vocabulary that no token has; its program cuts them off.
    """
    texts = tokenizer(backbone)
    plain = len(texts)
    model = random_model(backbone, plain + 3, seed=2)
    module = torch.nn.Module()
    module.base_causallm, module.embedding = model, model.get_input_embeddings()
    init = folder / "checkpoint_12"
    settings = {"init": str(init), "reasoner": f"coconut_{backbone}"}
    settings["base"] = _save_base(folder, model, plain + padding, texts)
    case = enliven(Published(settings, model, texts, plain, plain + 1, line))
    if safe:
        safetensors.torch.save_model(module, init)
    else:
        torch.save(module.state_dict(), init)
    return case


def codi_original(
    folder: Path, backbone: str, safe: bool = False, padding: int = 0
) -> Published:
    """The state dict of a module that holds the model with LoRA adapters of scale 16 / 8, and the projector.

    Padded rows stay in this one.
    """
    peft = pytest.importorskip("peft")
    texts = tokenizer(backbone)
    plain = len(texts) + padding
    model = random_model(backbone, plain, seed=33)
    base = _save_base(folder, model, plain, texts)
    model.resize_token_embeddings(plain + 3, mean_resizing=False)
    lora = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules="all-linear",
        fan_in_fan_out=backbone == "gpt2",
    )
    module = torch.nn.Module()
    module.codi, module.prj = peft.get_peft_model(model, lora).eval(), projector()
    randomise(module.codi, seed=34)
    merged = copy.deepcopy(module.codi).merge_and_unload()
    init = folder / ("model.safetensors" if safe else "pytorch_model.bin")
    settings = {
        "init": str(init),
        "reasoner": f"codi_{backbone}",
        "base": base,
        "lora_alpha": 16.0,
    }
    case = Published(
        settings,
        merged,
        texts,
        plain + 1,
        plain + 2,
        _tidy,
        module.prj,
        banned=(plain + 2,),
    )
    enliven(case, module.codi)
    if safe:
        safetensors.torch.save_model(module, init)
    else:
        torch.save(module.state_dict(), init)
    return case


class _CodiGPT2(transformers.GPT2LMHeadModel):
    """A GPT-2 with CODI's projector, as a model of transformers."""

    def __init__(self, config):
        super().__init__(config)
        self.projector = projector(last="4")


def codi_hugging_face(folder: Path) -> Published:
    """Merged weights and the projector in one directory; the tokens are known to the tokenizer by name."""
    texts = tokenizer("gpt2")
    texts.add_special_tokens({"additional_special_tokens": ["[PAD]", START, END]})
    model = _CodiGPT2(random_model("gpt2", len(texts)).config)
    randomise(model, seed=5)
    settings = {"init": str(folder), "reasoner": "codi_gpt2"}
    start, end = (texts.convert_tokens_to_ids(token) for token in (START, END))
    case = enliven(
        Published(settings, model.eval(), texts, start, end, str, model.projector)
    )
    model.save_pretrained(folder)
    texts.save_pretrained(folder)
    return case
