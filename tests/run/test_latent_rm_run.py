"""The stage latent_rm: labels that are kept and gone on with, what is refused, and the report by its reward model."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from imitation import Crash, crash_at
from same_run import assert_same, assert_same_run, checkpoint_of, rows_of
from slpo_jax import load
from slpo_jax.api.conversion import export_checkpoint
from slpo_jax.config import config_checks
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.orbax import load_params, params_digest
from slpo_jax.policy.policy import Prompts
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.scorers import init_reward_model, latent_scores
from slpo_jax.rewards.reward import REWARDS, RewardEntry
from slpo_jax.run import latent_rm as labels
from slpo_jax.run import train_stage
from slpo_jax.run.experiment import build
from slpo_jax.run.run_stages import check_stages, run_stages
from slpo_jax.run.train_stage import read_stage_params
from small_run import load_config


def config_of(**changes):
    config = load_config()
    config.stages = ("imitate", "latent_rm", "evaluate")
    config.gate.enabled = False
    config.checkpoint_every = 5
    config.dropout.rate = 0.4
    config.imitate.control = False
    config.latent_rm.update(
        problems=24, thoughts=4, completions=3, dropout=0.7, batch_size=4, steps=6
    )
    config.latent_rm.optimizer.update(learning_rate=1e-2, warmup_steps=1)
    config.evaluate.update(
        scorers=("likelihood", "latent_rm"),
        samples=4,
        beams=2,
        candidates=2,
        datasets=("made",),
    )
    config.update_from_flattened_dict(changes)
    return config_checks.check(config)


def experiment_of(workdir, **changes):
    return build(config_of(**changes), workdir)


@pytest.fixture(scope="module", autouse=True)
def sampled_answers():
    """Greedy answers of so small a model are all the same."""

    own = labels.labelling

    def sampling(experiment):
        policy, rule = own(experiment)
        return policy.with_config(temperature=1.0), rule

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "labelling", sampling)
        yield


@pytest.fixture(scope="module")
def work(tmp_path_factory, cpu_devices):
    found = tmp_path_factory.mktemp("latent_rm") / "work"
    run_stages(config_of(), found)
    return found


@pytest.fixture
def copy(work, tmp_path):
    return shutil.copytree(work, tmp_path / "work")


def labels_in(workdir) -> dict[str, np.ndarray]:
    files = {
        path.stem: dict(np.load(path)) for path in (workdir / "labels").glob("*.npz")
    }
    return {
        f"{number}.{name}": array
        for number, file in files.items()
        for name, array in file.items()
    }


def trained(workdir):
    """The reward model's parameters."""
    experiment = experiment_of(workdir)
    like = init_reward_model(
        read_stage_params(experiment.stage("imitate")), experiment.reasoner.width
    )
    return load_params(experiment.workdir.stage_folder("latent_rm").path, like)


def test_a_label_is_the_share_of_right_completions_of_a_beginning(
    tmp_path, cpu_devices, monkeypatch, second_process
):
    """Of problems with right and wrong thoughts; where they go on, answers have noise too. Rollouts without a model."""
    counts = {
        "stages": ("latent_rm",),
        "latent_rm.problems": 5,
        "latent_rm.thoughts": 3,
        "latent_rm.completions": 4,
    }
    experiment = experiment_of(tmp_path / "work", **counts)
    where = {}
    slots = experiment.config.max_answer_tokens
    steps = experiment.config.max_latents
    right_of = np.array(
        [[1, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 1]], bool
    )  # the last fills batches up
    eos = experiment.train.template.eos_id
    answers = jnp.array(
        [[*own, *[eos] * slots][:slots] for own in experiment.train.answers[:5]]
    )

    def say(index, right):
        return jnp.where(right[..., None], answers[index], eos)

    def goes_on(index, thought, step, number):
        return (index + thought + step * number) % 3 == 0

    def draw(policy, params, batch, rule, key, thoughts):
        where["thoughts"] = policy.config.dropout_where
        index = jnp.repeat(batch.draw_ids, thoughts)
        thought = jnp.tile(jnp.arange(thoughts), len(batch.draw_ids))
        latents = jnp.zeros((len(index), steps, experiment.reasoner.width))
        return Trajectories(
            latents,
            1 + thought,
            say(index, jnp.asarray(right_of)[index, thought]),
            None,
        )

    def complete(policy, params, batch, actions, lengths, rule, key, count):
        where["completions"] = policy.config.dropout_where
        index = jnp.repeat(batch.draw_ids, 3)[:, None, None]
        step = 1 + jnp.arange(steps)[None, :, None]
        number = jnp.arange(count)[None, None]
        right = goes_on(index, lengths[:, None, None] - 1, step, number)
        return say(jnp.broadcast_to(index, right.shape), right), jnp.broadcast_to(
            step, right.shape
        )

    monkeypatch.setattr(labels, "draw_thoughts", draw)
    monkeypatch.setattr(labels, "complete", complete)
    found = labels.labels_of(experiment.stage("latent_rm"), experiment.initial_params())
    assert where == {"thoughts": "thought", "completions": "all"}
    assert found.problems.tolist() == [1, 4]
    index, thought, step, number = np.ix_(
        [1, 4], range(3), range(1, steps + 1), range(4)
    )
    np.testing.assert_allclose(
        found.shares, goes_on(index, thought, step, number).mean(axis=-1), atol=1e-6
    )
    file = tmp_path / "work" / "labels" / "0.npz"
    file.unlink()
    with second_process(), pytest.raises(UserError, match=rf"^{file}: process 1 "):
        labels.labels_of(experiment.stage("latent_rm"), experiment.initial_params())


def test_labels_are_bound_to_all_that_makes_them(tmp_path, cpu_devices, monkeypatch):
    """Thoughts and completions by their law and numbers, and what is right; not how a reward model is trained."""
    monkeypatch.setitem(REWARDS, "mine", RewardEntry(lambda completion: 1.0))
    facts = {}

    def start(**changes):
        return experiment_of(tmp_path / "work", stages=("latent_rm",), **changes).stage(
            "latent_rm"
        )

    def refused(**changes):
        facts.update(labels.check_labels(start(**changes), lambda: {"w": jnp.zeros(2)}))

    refused()
    artifact.write(labels.manifest_of(tmp_path / "work" / "labels"), facts)
    refused(**{"latent_rm.steps": 7})
    for key, value in {
        "seed": 1, "reward": "mine", "latent_rm.threshold": 0.4, "latent_rm.dropout": 0.6,
        "max_answer_tokens": 3,
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=rf"^config\.{key}: "):
            refused(**{key: value})


@pytest.mark.slow
def test_labels_and_the_report_by_them(work):
    found = labels_in(work)
    assert {name.partition(".")[0] for name in found} == {"0", "1", "2"}
    shares = np.concatenate(
        [array for name, array in found.items() if name.endswith("shares")]
    )
    assert shares.shape[1:] == (4, 3)
    assert {round(3 * share) for share in shares.ravel().tolist()} <= {0, 1, 2, 3}
    assert 0 < len(shares) < 24
    assert np.abs(trained(work)["classifier"]["kernel"]).max() > 0
    figures = json.loads((work / "report.json").read_text())["eval"]["imitate"]["made"]
    assert 0 <= figures["best@4_latent_rm"] <= figures["pass@4"]
    assert 0 <= figures["searched"] <= 1


@pytest.mark.slow
def test_what_is_missing_is_made_the_same_to_the_bit(work, copy, warnings):
    """Without validation problems the last model is kept, and that is said; of the fixture it is the one validated."""
    (copy / "labels" / "1.npz").unlink()
    (copy / "labels" / "2.npz").write_bytes(
        (copy / "labels" / "2.npz").read_bytes()[:100]
    )
    shutil.rmtree(copy / "checkpoints" / "latent_rm")
    run_stages(config_of(stages=("latent_rm",), **{"data.valid": ""}), copy)
    assert (
        "latent_rm: config.data.valid is not set, so the last step's model is kept, not the best"
        in warnings
    )
    assert_same(labels_in(work), labels_in(copy))
    assert params_digest(trained(work)) == params_digest(trained(copy))


@pytest.mark.slow
def test_the_best_on_validation_is_kept_also_after_a_kill(work, tmp_path, monkeypatch):
    """Its accuracy is a loop's, a thought at a time; a run that was killed after the best validation ends the same."""
    asked = {
        "stages": ("latent_rm",),
        "latent_rm.evaluate_every": 2,
        "evaluate.limit": 0,
    }
    whole, cut = (shutil.copytree(work, tmp_path / name) for name in ("whole", "cut"))
    for folder in (whole, cut):
        shutil.rmtree(folder / "checkpoints" / "latent_rm")
        (folder / "metrics.jsonl").unlink()
    run_stages(config_of(**asked), whole)
    found = {
        row["step"]: row["valid_accuracy"]
        for row in rows_of(whole)
        if "valid_accuracy" in row
    }
    assert (list(found), found[6] < max(found.values())) == ([2, 4, 6], True)
    kept, left = (
        checkpoint_of(whole, "latent_rm", step)
        for step in (max(found, key=found.get), 6)
    )
    assert_same(
        *(
            {k: v for k, v in each.items() if k.startswith("['params']")}
            for each in (kept, left)
        )
    )

    experiment = experiment_of(whole, **asked)
    thoughts = labels.judged_thoughts(
        experiment, read_stage_params(experiment.stage("imitate"))
    )
    assert len(thoughts.problems) == len(experiment.valid) == 12
    policy = labels.labelling(experiment)[0]
    model = jax.device_get(trained(whole))
    right = []
    for problem, latents_NTD in enumerate(thoughts.latents):
        prompt = Prompts(
            *experiment.valid.prompt_batch(np.array([problem]), experiment.prompt_slots)
        )
        scores = [
            latent_scores(policy, model, prompt, each[None], np.array([3]))
            for each in latents_NTD
        ]
        right.append(
            thoughts.shares[problem, np.argmax([each.sum() for each in scores]), 0]
        )
    assert found[kept["step"]] == pytest.approx(np.mean(right))

    with monkeypatch.context() as patch:
        crash_at(patch, train_stage, 5)
        with pytest.raises(Crash):
            run_stages(config_of(**asked), cut)
    run_stages(config_of(**asked), cut)
    assert_same_run(cut, whole, "latent_rm")


@pytest.mark.slow
def test_labels_of_another_checkpoint_or_damaged_are_one_line(copy):
    shutil.rmtree(copy / "checkpoints" / "latent_rm")
    manifest = copy / "labels" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(
        text.replace('"latent_rm.completions": 3', '"latent_rm.completions": 4')
    )
    with pytest.raises(UserError, match=rf"^{manifest}: .*{copy}/labels"):
        check_stages(experiment_of(copy, **{"latent_rm.completions": 4}))
    manifest.write_text(text)
    shutil.rmtree(copy / "checkpoints" / "imitate")
    with pytest.raises(UserError, match=r"^checkpoint: "):
        run_stages(
            config_of(stages=("imitate", "latent_rm"), **{"imitate.final_steps": 20}),
            copy,
        )


@pytest.mark.slow
def test_a_reward_model_of_another_checkpoint_is_said_and_of_another_reasoner_refused(
    copy, tmp_path, warnings
):
    model = copy / "checkpoints" / "latent_rm"
    given = {"stages": ("imitate", "evaluate"), "evaluate.reward_model": str(model)}
    check_stages(experiment_of(copy, **given))
    assert not warnings
    manifest = copy / "labels" / "manifest.json"
    artifact.write(manifest, artifact.read(manifest).facts | {"checkpoint": "another"})
    check_stages(experiment_of(copy, **given))
    assert (
        [line for line in warnings if "judged thoughts of another checkpoint" in line]
        == warnings
        != []
    )
    with pytest.raises(UserError, match=r"^config\.evaluate\.reward_model: "):
        check_stages(experiment_of(tmp_path / "other", **given, **{"model.n_embd": 8}))
    for use in (load, lambda source: export_checkpoint(source, tmp_path / "exported")):
        with pytest.raises(
            UserError, match=r"^\S+: .*classifier.*evaluate\.reward_model"
        ):
            use(model)
