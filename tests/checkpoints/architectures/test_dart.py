"""Silent tokens against a slow loop of full forwards, and what the two pathways write."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.special import erf

import tiny
from codi_run import PHASE, PROBLEMS, ROWS, new_tokenizer
from plain_gpt2 import plain_hidden
from slpo_jax.architectures.codi import Dart
from slpo_jax.data.batches import encode_problems
from slpo_jax.errors import UserError
from slpo_jax.policy.rollout import sample
from slpo_jax.training.recipes import ImitateSettings, imitate_config, recipe_of
from tiny import compiled, keys_of, policy_of, random_prompts, real_tokens

KIND = Dart(9)
LATENTS = 3
CONFIG_OF_RUN = dataclasses.replace(
    tiny.ROLLOUT, max_latents=LATENTS, stopping="length", dropout_rate=0.0
)


def params_of(evolved: bool):
    """As they begin, where the network's last layer is 0; or with everything in use."""
    init = KIND.on(tiny.CONFIG).init(jax.random.key(1))
    rng = np.random.default_rng(2)
    own = init["evolution"]
    if evolved:
        own = jax.tree.map(
            lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), own
        )
    return {
        "reasoner": tiny.random_params() | {"evolution": own},
        "gate": tiny.random_gate(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("evolved", [False, True])
def test_a_thought_is_that_of_full_forwards(evolved):
    """At first all silent tokens have the same input, so that one forward is enough; then each has the state before."""
    params = params_of(evolved)
    policy = policy_of(CONFIG_OF_RUN, KIND.on(tiny.CONFIG))
    prompts = random_prompts((4, 7), 8)
    rolled = compiled(sample, policy)(
        params, prompts, keys_of(2), np.full(2, LATENTS, np.int32)
    )
    tree = jax.tree.map(lambda x: np.asarray(x, np.float64), params["reasoner"])
    own = tree["evolution"]
    wte = tree["backbone"]["wte"]
    for row in range(2):
        inputs = list(wte[real_tokens(prompts, row)])
        if evolved:
            for _ in range(LATENTS):
                x = (
                    plain_hidden(tree, np.stack(inputs), {})[-1]
                    @ own["fc_in"]["kernel"]
                    + own["fc_in"]["bias"]
                )
                x = x * (1 + erf(x / 2**0.5)) / 2
                inputs.append(
                    own["silent"] + x @ own["fc_out"]["kernel"] + own["fc_out"]["bias"]
                )
        else:
            inputs += [own["silent"]] * LATENTS
        thought = np.stack(inputs[-LATENTS:])
        np.testing.assert_allclose(rolled.actions[row], thought, rtol=2e-4, atol=2e-5)
        inputs.append(wte[tiny.END])
        first = np.argmax(plain_hidden(tree, np.stack(inputs), {})[-1] @ wte.T)
        assert rolled.tokens[row, 0] == first


def test_one_pathway_writes_every_step_and_the_other_none(tmp_path_factory):
    tokenizer = new_tokenizer(tmp_path_factory, digits=False)
    template = Dart(1).template(tokenizer)
    problems = encode_problems(template, PROBLEMS)
    settings = imitate_config()
    assert isinstance(settings, ImitateSettings)
    recipe = recipe_of(settings, Dart.default_recipe)
    batch = recipe.batch(problems, PHASE, 0, 1, 4, (24,), recipe.slots(problems, PHASE))
    texts = [
        tokenizer.decode(row, skip_special_tokens=True) for row in batch.text.tokens
    ]
    silent = [
        tokenizer.decode(row, skip_special_tokens=True)
        for row in batch.student.suffix.tokens
    ]
    for question, steps, answer in ROWS:
        (text,) = (each for each in texts if each.startswith(question))
        assert text.startswith(question + " ".join(steps) + f"The answer is: {answer}")
        assert any(each.startswith(f"The answer is: {answer}") for each in silent)
    assert not [each for each in silent if "<<" in each]


def test_a_file_without_its_network_is_refused():
    unwrapped = Dart.unwrap({"silent.embedding": np.zeros(4)}, "here")
    with pytest.raises(UserError, match=r"here: .*silent\.fc_in\.weight"):
        Dart.from_checkpoint(unwrapped, {}, "here")
