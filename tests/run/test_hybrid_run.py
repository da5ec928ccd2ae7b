"""Latent policies that write and have parameters, in a run: rates, checkpoints, completions, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asked import write_config
from imitation import Crash, crash
from on_device import encode_references
from slpo_jax.api import solver
from slpo_jax.api.conversion import export_checkpoint
from slpo_jax.api.trained_reasoner import describe
from slpo_jax.config import read_config
from slpo_jax.data.templates import token_texts
from slpo_jax.errors import UserError
from slpo_jax.evaluation.completions import thought_rows
from slpo_jax.evaluation.evaluator import Evaluator
from slpo_jax.evaluation.report_rows import baselines_of
from slpo_jax.io.orbax import save_params
from slpo_jax.models.parts import DECODER
from slpo_jax.policy.explain import reads_of
from slpo_jax.policy.policy import PromptedBatch, Prompts
from slpo_jax.policy.rollout import NO_TOKEN, Trajectories
from slpo_jax.run import train_imitation
from slpo_jax.run.experiment import build, rows
from slpo_jax.run.train_rl import (
    make_objective_optimizer,
    make_optimizer_config,
    make_training_policy,
)
from slpo_jax.run.train_stage import read_stage_params
from slpo_jax.training import rollouts
from small_run import load_config, train
from tiny import compiled

T = 3
A = 4
TEXT = {
    "reasoner": "text_gpt2", "gate.enabled": False, "imitate.c_thought": 0, "dropout.rate": 0.0,
    "data.train": "synthetic:train", "data.eval.made": "synthetic:test", "evaluate.batch_size": 8,
}  # fmt: skip
HYBRID = TEXT | {"latent_policy.name": "hybrid", "objective.exact.latent_policy_learning_rate": 4e-3,
                 "rl.optimizer.name": "adamw", "rl.capacities": ((0.5, 0.5), (0.8, 0.5), (1.0, 1.0))}  # fmt: skip


def _built(folder, changes):
    config = load_config()
    del config.data.eval["real"]
    config.update_from_flattened_dict(changes)
    experiment = build(read_config(config), folder)
    experiment.log.close()
    return experiment


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A run's setup, its parameters, and where they are saved, all of them and without the latent policy's."""
    folder = tmp_path_factory.mktemp("hybrid")
    experiment = _built(folder / "work", HYBRID)
    params = experiment.initial_params()
    for name, kept in (
        ("saved", params),
        ("bare", {name: params[name] for name in ("reasoner", "gate")}),
    ):
        save_params(folder / name, kept)
        experiment.checkpoint.write(folder / name / "reasoner")
        write_config(folder / name, experiment.config)
    return experiment, params, folder


@pytest.mark.slow
def test_the_latent_policy_s_parameters_have_rates_of_their_own(hybrid):
    """Adam's first step is the rate, whatever the gradient."""
    experiment, params, _ = hybrid
    objective = experiment.config.objective["exact"]
    rl = experiment.stage("exact").settings
    policy = make_training_policy(experiment, rl)
    objective.check("config.objective.exact", policy, 4)
    assert len(policy.capacities) == 3  # thoughts differ in length
    trained = {name: params[name] for name in ("reasoner", "latent_policy")}
    optimizer = make_objective_optimizer(
        make_optimizer_config(rl, objective), policy, objective, trained
    )
    gradient = jax.tree.map(jnp.ones_like, trained)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(trained), trained)
    sizes = {
        jax.tree_util.keystr(path): -float(x.ravel()[0])
        for path, x in jax.tree_util.tree_leaves_with_path(updates)
    }
    for path, size in sizes.items():
        rate = 1e-3 if "reasoner" in path else 4e-2 if "decay" in path else 4e-3
        assert size == pytest.approx(rate, rel=1e-4), path
    assert len({round(size, 6) for size in sizes.values()}) == 3


RECIPES = {
    "lora, hybrid": HYBRID | {"imitate.lora.rank": 2},
    "simcot, lora": {"imitate.recipe": "simcot", "imitate.lora.rank": 2},
    "simcot, kept": {
        "imitate.recipe": "simcot",
        "imitate.simcot.keep": True,
        "dropout.rate": 0.0,
        "rl.steps": 1,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_with_parts_of_their_own_leave_what_rl_starts_from(
    name, tmp_path, monkeypatch
):
    """Killed before they are finished, too: all other parts are there, and the reasoner is trained.

    What is kept is carried along as it is.
    """
    changes = RECIPES[name] | {"imitate.control": False, "imitate.cot_steps": 0, "imitate.final_steps": 2,
                               "stages": ("imitate", "rl"), "rl.objectives": ("grpo",)}  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(train_imitation, "save_finished", crash)
        with pytest.raises(Crash):
            train(_built(tmp_path, changes), "imitate")
    experiment = _built(tmp_path, changes)
    train(experiment, "imitate")
    first = experiment.initial_params()
    left = read_stage_params(experiment.stage("grpo").start)
    kept = {DECODER} if changes.get("imitate.simcot.keep") else set()
    assert left.keys() == first.keys() | kept
    assert jax.tree.structure(
        {part: left[part] for part in first}
    ) == jax.tree.structure(first)
    if kept:
        assert reads_of(left) == (1, 1)
        problems = experiment.test_set("made")
        texts = token_texts(experiment.template, 99)
        seen = experiment.evaluator.run(
            left, problems, "length", 2, limit=3, probed=True
        )
        words = [
            [experiment.reward.read(said).text.strip() for said in row[:2]]
            for row in seen["words"]
        ]
        probed = thought_rows(
            experiment.reward, texts, seen, gated=False, reads=reads_of(left)
        )
        for row, said in zip(probed, words, strict=True):
            assert [
                latent["words"].removesuffix(" ...") for latent in row["latents"]
            ] == said
        train(experiment, "rl")
        jax.tree.map(
            np.testing.assert_array_equal,
            read_stage_params(experiment.stage("grpo"))[DECODER],
            left[DECODER],
        )
    for part in left.keys() - {"reasoner", *kept}:
        jax.tree.map(np.testing.assert_array_equal, left[part], first[part])
    assert np.any(left["reasoner"]["backbone"]["h_0"]["mlp"]["c_fc"]["kernel"]
                  != first["reasoner"]["backbone"]["h_0"]["mlp"]["c_fc"]["kernel"])  # fmt: skip


def test_without_a_gate_imitation_is_what_an_objective_is_compared_with(tmp_path):
    experiment = _built(
        tmp_path, TEXT | {"max_latents": 0, "rl.objectives": ("exact",)}
    )
    by_name = {row.name: row for row in rows(experiment)}
    of_imitation = ("imitate_control", "imitate_no_thought", "imitate", "best_fixed")
    assert by_name["exact"].baselines[-len(of_imitation) :] == of_imitation
    assert {"imitate", "best_fixed"} <= baselines_of(by_name["exact"], by_name).keys()


@pytest.mark.slow
def test_what_a_thought_wrote_is_read(hybrid):
    """Every number that a rollout says, in thought or after it, is in the text that is verified and recorded."""
    experiment, params, _ = hybrid
    problems = experiment.test_set("made")
    reward = experiment.reward
    done = experiment.evaluator.run(params, problems, "length", T, seed=0, limit=8)
    assert done["tokens"].shape == (8, T + A)
    vocabulary = experiment.template.tokenizer.convert_ids_to_tokens
    for tokens, steps in zip(done["tokens"], done["latent_steps"], strict=True):
        ids, text, *_ = reward.read(tokens)
        eos = experiment.template.eos_id
        assert ids == [token for token in tokens.tolist() if token >= 0] or (
            ids[-1] == eos and eos not in ids[:-1]
        )
        assert len(ids) >= steps
        shown = [name for name in vocabulary(ids) if not name.startswith("<")]
        assert text.split() == " ".join(shown).split()
    assert reward.read(np.array([7, 8, NO_TOKEN, NO_TOKEN])).ids == [7, 8]


def test_rewards_and_votes_read_it_too(hybrid, monkeypatch):
    """The number is in the thought; the answer is eos alone."""
    experiment, params, _ = hybrid
    ids = experiment.template.tokenizer.convert_tokens_to_ids
    eos = experiment.template.eos_id
    rollout = {"said": jnp.array([ids(["7", "####", "5"])]), "lengths": jnp.array([T])}
    tokens = jnp.array([[eos] * A])

    def sampled(policy, params, prompts, keys_N, *rest):
        return Trajectories({}, tokens=tokens, keys=keys_N, **rollout)

    monkeypatch.setattr(rollouts, "sample", sampled)

    def rolled_out(*_, **__):
        seen = dict.fromkeys(
            ("stop", "likeliest_probability", "likeliest_token", "latents"),
            np.zeros((1, T, 1), int),
        )
        done = sampled(None, None, None, None)
        return seen | {
            "tokens": np.array(done.completions),
            "latent_steps": np.array(done.lengths),
        }

    monkeypatch.setattr(Evaluator, "run", rolled_out)
    batch = PromptedBatch(
        Prompts(None, None), encode_references(["5"], 1), jnp.zeros(1, int)
    )
    judge = experiment.reward.on_device
    rewards = compiled(
        lambda key: rollouts.roll_out(experiment.policy, None, batch, judge, 1, key)[1]
    )(experiment.key)
    assert rewards.tolist() == [[1.0]]
    asked = solver.Solver(experiment, params, "length", T)
    assert solver.vote(asked, "How many now ?", 1).majority == "5"
    found = solver.solve(asked, "How many now ?")
    assert (found.answer, found.text.split()) == ("5", ["7", "####", "5"])
    assert "thought   3 latents, a fixed number" in describe(asked, found)
    rollout.update(
        said=jnp.array([ids(["####", "<pad>", "<pad>"])]), lengths=jnp.array([1])
    )
    only_mark = describe(asked, solver.solve(asked, "How many now ?"))
    assert (
        "answer    none: the text has no number after its last #\ntext      ####\n"
        in only_mark
    )
    assert (
        "thought   1 latent of at most 3, until '####' or an end token came"
        in only_mark
    )


def test_parameters_of_another_latent_policy_are_one_line(hybrid, tmp_path):
    _, params, folder = hybrid
    stored = {"tokenizer": "synthetic:20", "init": str(folder / "saved")}
    with pytest.raises(UserError, match=r"^config\.latent_policy\.name: .*soft"):
        _built(
            tmp_path / "a", TEXT | stored | {"latent_policy.name": "soft"}
        ).initial_params()
    lacking = HYBRID | stored | {"init": str(folder / "bare")}
    with pytest.raises(UserError, match="hybrid"):
        _built(tmp_path / "b", lacking | {"stages": ("evaluate",)}).initial_params()
    found = _built(
        tmp_path / "c", lacking | {"stages": ("rl", "evaluate")}
    ).initial_params()
    np.testing.assert_array_equal(
        found["latent_policy"]["decay"], params["latent_policy"]["decay"]
    )
    with pytest.raises(UserError, match=r"saved: .*latent policy"):
        export_checkpoint(folder / "saved", tmp_path / "exported")
