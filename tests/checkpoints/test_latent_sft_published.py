"""A plain Llama or Qwen2 as Latent-SFT publishes its own, with the shipped config, against a loop in transformers."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import published
from slpo_jax.config import read_config
from slpo_jax.config.registry import read_config_file
from slpo_jax.data.batches import pad_prompts
from slpo_jax.policy.policy import Prompts
from slpo_jax.policy.rollout import sample
from slpo_jax.run.setup import assemble
from tiny import compiled, keys_of

torch = pytest.importorskip("torch")
STEPS = 6
ANSWER = 5
ASKED = "Please reason step by step, and put your final answer within \\boxed{}."
PROMPTS = {
    "llama": f"<|start_header_id|>user<|end_header_id|>\n\n{ASKED}\n%s<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n<think>",
    "qwen2": f"<|im_start|>system\n{ASKED}<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n<think>",
}


def _likeliest(model, inputs):
    with torch.no_grad():
        return model(inputs_embeds=inputs[None]).logits[0, -1]


def _think(model, prompt, closing):
    """The inputs after prompt and thought, by soft tokens of the ten likeliest, and the tokens that were likeliest."""
    table = model.get_input_embeddings().weight.detach()
    said = []
    inputs = table[prompt]
    while len(said) < STEPS:
        logits, ids = _likeliest(model, inputs).topk(10)
        said.append(int(ids[0]))
        if said[-1] == closing:
            return inputs, said[:-1]
        inputs = torch.cat([inputs, (logits.softmax(-1) @ table[ids])[None]])
    return inputs, said


@pytest.mark.parametrize(
    ("name", "method", "start"),
    [
        ("soft_llama1b", "latent_sft", "meta-llama/Llama-3.2-1B-Instruct"),
        (
            "soft_llama1b",
            "latent_grpo",
            "DJCheng/LLaMA3.2-1B-Instruct-Latent-SFT-Top10",
        ),
        pytest.param(
            "soft_qwen7b",
            "latent_grpo",
            "DJCheng/Qwen2.5-Math-7B-Latent-GRPO-4k-Top10",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_published_checkpoint_thinks_and_answers_as_its_program_does(
    tmp_path, name, method, start
):
    """Prompt without bos, mixtures of ten, the end at the first token of </think>, all of which are fed.

    Latent-GRPO's are evaluated without its noise.
    """
    family = "qwen2" if "qwen" in name else "llama"
    texts = published.tokenizer(family)
    prompt = PROMPTS[family]
    texts.add_special_tokens(
        {
            "additional_special_tokens": list(
                dict.fromkeys(re.findall(r"<\|\w+\|>", prompt))
            )
        }
    )
    model = published.random_model(family, len(texts), max_position_embeddings=512)
    ids = lambda text: texts(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompts = [ids(prompt % question) for question in published.QUESTIONS]
    closing = ids("</think>")
    table = model.get_input_embeddings().weight
    assert len(closing) > 1
    with torch.no_grad():  # the first thought ends before its third step
        table[closing[0]] = 1.05 * table[_think(model, prompts[0], None)[1][2]]
    model.save_pretrained(tmp_path)
    texts.save_pretrained(tmp_path)

    config = read_config_file(f"{name}:{method}")
    assert config.init == start
    config.update(
        init=str(tmp_path),
        max_latents=STEPS,
        max_answer_tokens=ANSWER,
        stages=("evaluate",),
    )
    config.model.dtype = "float32"
    setup = assemble(read_config(config))
    assert setup.template.prompts(published.QUESTIONS) == prompts
    padded = Prompts(*map(jnp.asarray, pad_prompts(prompts, (256,))))
    policy = setup.policy.without_noise().with_config(stopping="length")
    rows = len(prompts)
    made = compiled(sample, policy)(
        setup.initial_params(), padded, keys_of(rows), jnp.full(rows, STEPS)
    )
    lengths = []
    for row, prompt in enumerate(prompts):
        inputs, said = _think(model, prompt, closing[0])
        lengths.append(len(said))
        inputs = torch.cat([inputs, table[closing].detach()])
        answer = []
        while len(answer) < ANSWER and texts.eos_token_id not in answer:
            answer.append(int(_likeliest(model, inputs).argmax()))
            inputs = torch.cat([inputs, table[answer[-1:]].detach()])
        assert np.asarray(made.tokens[row])[: len(answer)].tolist() == answer
    assert np.asarray(made.lengths).tolist() == lengths
    assert lengths[0] < 3
