"""Objectives, advantages and latent policies that can't be used are refused in one line, before any work."""

from types import SimpleNamespace

import pytest
from small_run import load_config

from slpo_jax.config import objective_of, read_config
from slpo_jax.config.presets import objective_variant
from slpo_jax.config.validate import check
from slpo_jax.errors import UserError
from slpo_jax.rewards.reward import CORRECT, REWARDS
from slpo_jax.run.experiment import build
from slpo_jax.run.plan import check_stages
from slpo_jax.run.rl import make_objective, optimizer_config
from slpo_jax.run.validate import check_answers
from slpo_jax.stages import SECTIONS

_TEXT = {
    "reasoner": "text_gpt2", "gate.enabled": False, "stages": ("imitate",), "imitate.c_thought": 0,
    "imitate.control": False, "latent_policy.name": "soft",
}  # fmt: skip
_LATENT_SFT = _TEXT | {
    "imitate.recipe": "latent_sft", "prompt.format": "{question} <think>", "prompt.closing": "</think>",
}  # fmt: skip
_COLAR = {
    "reasoner": "colar_gpt2", "gate.enabled": False, "stages": ("imitate",), "imitate.control": False,
    "latent_policy.name": "colar",
}  # fmt: skip
_TOP_K = _TEXT | {"latent_policy.name": "gumbel_top_k"}

# case -> (changes, what the line begins with, what it says)
CASES = {
    "an unknown objective": (
        {"rl.objectives": ("slpp",)},
        "config.rl.objectives: 'slpp' is unknown",
        "use one of answer_only, exact, grpo, pathwise, slpo",
    ),
    "no objective": ({"rl.objectives": ()}, "config.rl.objectives: ()", "at least one"),
    "an objective twice": (
        {"rl.objectives": ("slpo", "pathwise", "slpo")},
        "config.rl.objectives: ('slpo', 'pathwise', 'slpo')",
        "give each name once",
    ),
    "an unknown advantage": (
        {"objective.slpo.advantage": "ppo"},
        "config.objective.slpo.advantage: 'ppo'",
        "rloo, grpo, pkpo",
    ),
    "an unknown estimator": (
        {"objective.pathwise.estimator": "best"},
        "config.objective.pathwise.estimator: 'best'",
        "pass_at_k, reward, mixture",
    ),
    "a mixture of more than all": (
        {"objective.pathwise.mixture_weight": 1.5},
        "config.objective.pathwise.mixture_weight: 1.5",
        "from 0 to 1",
    ),
    "adapters of a rank below 0": ({"rl.lora.rank": -1}, "config.rl.lora.rank: -1 is not valid", "0 or more"),
    "adapters of kernels that there are not": (
        {"rl.lora.rank": 2, "rl.lora.kernels": ("q_proj",)},
        "config.rl.lora.kernels: 'q_proj' is no kernel of this model",
        "it has c_attn, c_fc, c_proj",
    ),
    "an unknown latent policy": (
        {"latent_policy.name": "noise"},
        "config.latent_policy.name: 'noise'",
        "latent, additive",
    ),
    "additive noise of nothing": (
        {"latent_policy.additive.sigma": 0.0},
        "config.latent_policy.additive.sigma: 0.0",
        "above 0",
    ),
    "exact without a likelihood": (
        {"rl.objectives": ("exact",)},
        "config.objective.exact: needs a thought with a likelihood",
        "use one of additive, colar",
    ),
    "exact under dropout": (
        {"rl.objectives": ("exact",), "latent_policy.name": "additive"},
        "config.dropout.rate: 0.3",
        "config.objective.exact needs; set it to 0",
    ),
    "labels of another number of tokens": (
        _LATENT_SFT | {"imitate.latent_sft.top_k": 5},
        "config.imitate.latent_sft.top_k: 5, but config.latent_policy.soft mixes 10 tokens",
        "give both the same",
    ),
    "labels of more tokens than there are": (
        _LATENT_SFT | {"latent_policy.name": "gumbel_top_k", "imitate.latent_sft.top_k": 9999},
        "config.imitate.latent_sft.top_k: 9999 tokens, but the tokenizer has",
        "lower it",
    ),
    "mixtures of more tokens than there are": (
        _TEXT | {"latent_policy.soft.top_k": 9999},
        "config.latent_policy.soft.top_k: 9999 tokens are more than the",
        "of the vocabulary; lower it",
    ),
    "at least more tokens than there are": (
        _TOP_K | {"latent_policy.gumbel_top_k.least": 9999},
        "config.latent_policy.gumbel_top_k.least: 9999 tokens",
        "lower it",
    ),
    "a density of clipped noise": (
        _TOP_K | {"latent_policy.gumbel_top_k.likelihood": "exact"},
        "config.latent_policy.gumbel_top_k.likelihood: 'exact'",
        "set down and up to None and shift to 0",
    ),
    "no latents to be labelled": (
        _LATENT_SFT | {"max_latents": 0, "min_latents": 1},
        "config.max_latents: 0, but the recipe latent_sft trains thoughts",
        "give 1 or more, or 0 for config.imitate.final_steps",
    ),
    "no latents to be compressed to": (
        _COLAR | {"max_latents": 0, "min_latents": 1},
        "config.max_latents: 0, but the recipe colar trains thoughts",
        "give 1 or more",
    ),
    "thoughts that can't end": (
        _COLAR | {"latent_policy.colar.least": 4},
        "config.latent_policy.colar.least: 4 steps",
        "config.max_latents (3); lower it or raise that",
    ),
    "steps in latents that CoLaR doesn't have": (
        _COLAR | {"imitate.recipe": "curriculum"},
        "config.imitate.recipe: curriculum doesn't teach colar_gpt2 to think",
        "for its own, colar",
    ),
    "silent tokens in words": (
        _TEXT | {"imitate.recipe": "silent"},
        "config.imitate.recipe: silent doesn't teach text_gpt2 to think",
        "for its own, curriculum",
    ),
    "a reference answer that doesn't fit": (
        {"rl.objectives": ("pathwise",), "max_answer_tokens": 2},
        "config.data.train: the answer of problem 0",
        "takes 3 tokens with its end, more than config.max_answer_tokens (2); raise it",
    ),
    "greedy answers with a pathwise reward": (
        {"rl.objectives": ("pathwise",), "objective.pathwise.estimator": "reward", "rl.temperature": 0.0},
        "config.objective.pathwise.temperature: answers at 0.0",
        "set it to 1.0",
    ),
    "pathwise on thoughts that are all one": (
        {"rl.objectives": ("pathwise",), "dropout.rate": 0.0, "gate.enabled": False, "stages": ("imitate", "rl")},
        "config.objective.pathwise.estimator: pass_at_k is of 4 thoughts, which without noise are all one",
        "or estimator=reward",
    ),
    "k of pathwise": (
        {"rl.objectives": ("pathwise",), "objective.pathwise.k": 5},
        "config.objective.pathwise.k: 5 is more than the rollouts of a prompt (4)",
        "lower it or raise config.rl.group",
    ),
    "k of pkpo": (
        {"objective.slpo.advantage": "pkpo", "objective.slpo.pass_k": 5},
        "config.objective.slpo.pass_k: 5 is more than the 4 that pkpo can take",
        "lower it or raise the group",
    ),
    "pkpo without a baseline": (
        {"objective.slpo.advantage": "pkpo", "objective.slpo.pass_k": 1},
        "config.objective.slpo.pass_k: pkpo has no baseline at 1",
        "rloo",
    ),
    "k of pkpo_sloo": (
        {"objective.slpo.advantage": "pkpo_sloo", "objective.slpo.pass_k": 4},
        "config.objective.slpo.pass_k: 4 is more than the 3 that pkpo_sloo can take",
        "lower it or raise the group",
    ),
    "pkpo_sloo with greedy answers": (
        {"objective.slpo.advantage": "pkpo_sloo", "objective.slpo.pass_k": 2, "rl.temperature": 0.0},
        "config.objective.slpo.advantage: pkpo_sloo is for sampled answers",
        "use pkpo, or set the temperature to 1.0",
    ),
    "pkpo_sloo with the likeliest token alone": (
        {"objective.slpo.advantage": "pkpo_sloo", "objective.slpo.pass_k": 2, "rl.top_k": 1},
        "config.objective.slpo.advantage: pkpo_sloo is for sampled answers",
        "top_k to 0",
    ),
    "nothing to train": (
        {f"objective.slpo.{name}_weight": 0.0 for name in ("latent", "answer", "stop")},
        "config.objective.slpo: all weights",
        "set one",
    ),
    "passes without noise": (
        {"dropout.rate": 0.0},
        "config.objective.slpo.latent_weight: 1 scores thoughts under K passes that config.dropout.rate=0 makes",
        "raise the rate",
    ),
    "one pass": (
        {"objective.slpo.passes": 1},
        "config.objective.slpo.passes: one pass has no variance",
        "give at least 2",
    ),
    "more scored than thought": (
        {"objective.slpo.scored_latents": 9},
        "config.objective.slpo.scored_latents: 9 are more than config.max_latents=",
        "0 for all",
    ),
    "after no objective": (
        {"objective.slpo.after": "cold_start"},
        "config.objective.slpo.after: 'cold_start' is no objective",
        "use one of answer_only, exact, grpo, pathwise, slpo",
    ),
    "after one that comes later": (
        {"rl.objectives": ("slpo", "pathwise"), "objective.slpo.after": "pathwise"},
        "config.objective.slpo.after: pathwise is not trained before it",
        "put it before slpo into config.rl.objectives",
    ),
    "after itself": ({"objective.slpo.after": "slpo"}, "config.objective.slpo.after: slpo is not trained", "before it"),
    "after one that is not there": (
        {"objective.slpo.after": "pathwise"},
        "config.objective.slpo.after: pathwise is not in ",
        "put it before slpo into config.rl.objectives",
    ),
    "no step": ({"objective.slpo.steps": 0}, "config.objective.slpo.steps: 0", "1 or more"),
    "a longer warm-up than its own steps": (
        {"objective.slpo.steps": 3, "rl.optimizer.warmup_steps": 4},
        "config.rl.optimizer.warmup_steps: ",
        "3",
    ),
    "an unknown schedule": (
        {"objective.slpo.schedule": "falling"},
        "config.objective.slpo.schedule: 'falling' is not valid",
        "give one of '', constant, linear, cosine",
    ),
    "a warm-up that its own schedule has no room for": (
        {"objective.slpo.steps": 4, "objective.slpo.schedule": "linear", "rl.optimizer.warmup_steps": 4},
        "config.rl.optimizer.warmup_steps: 4",
        "a linear schedule of 4 steps in all has room for 3",
    ),
    "no answer and no stop": (
        {"rl.objectives": ("answer_only",)}
        | {f"objective.answer_only.{name}_weight": 0.0 for name in ("answer", "stop")},
        "config.objective.answer_only.answer_weight: 0",
        "set it",
    ),
}


def _check_all(config, tmp_path) -> None:
    check(config)
    experiment = build(read_config(config), tmp_path / "work")
    try:
        check_stages(experiment)
    finally:
        experiment.log.close()


def _refused(config, tmp_path) -> str:
    """The one line that a run of this config ends with."""
    with pytest.raises(UserError) as caught:
        _check_all(config, tmp_path)
    assert not (tmp_path / "work" / "checkpoints").exists()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 300
    return line


@pytest.mark.parametrize("case", CASES)
def test_one_line_before_any_work(case, tmp_path):
    changes, begins, says = CASES[case]
    config = load_config()
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    line = _refused(config, tmp_path)
    assert line.startswith(begins)
    assert says in line


@pytest.mark.parametrize(("estimator", "said"), [("pass_at_k", True), ("mixture", True), ("reward", False)])
@pytest.mark.parametrize("reward", [CORRECT, "mine"])
def test_that_pathwise_learns_references_whatever_the_reward_is_said_before(
    estimator, said, reward, tmp_path, warnings, monkeypatch
):
    monkeypatch.setitem(REWARDS, "mine", lambda question, reference, text: float(len(text)))
    config = load_config()
    config.update(reward=reward, stages=("imitate", "rl"))
    config.rl.update(objectives=("pathwise",), temperature=1.0)
    config.objective.pathwise.estimator = estimator
    _check_all(config, tmp_path)
    lines = [line for line in warnings if "config.reward=mine" in line]
    assert len(lines) == (said and reward == "mine")
    assert all(line.startswith("config.objective.pathwise: learns the reference answers") for line in lines)


@pytest.mark.parametrize(
    ("changes", "key", "budget"),
    [
        ({"stages": ("imitate",), "max_answer_tokens": 2}, "data.train", "max_answer_tokens"),
        ({"stages": ("cold_start",), "max_answer_tokens": 2}, "data.train", "max_answer_tokens"),
        ({"stages": ("rl",), "max_answer_tokens": 2}, "data.train", "max_answer_tokens"),
        ({"evaluate.max_answer_tokens": 2}, "data.eval.made", "evaluate.max_answer_tokens"),
        (
            {"stages": ("imitate", "cold_start"), "evaluate.max_answer_tokens": 2},
            "data.valid",
            "evaluate.max_answer_tokens",
        ),
    ],
)
def test_every_stage_checks_that_references_are_not_cut(changes, key, budget, tmp_path):
    """A sum's answer is #, its number and an end: three tokens."""
    config = load_config()
    config.update_from_flattened_dict(changes)
    expected = f"config.{key}: the answer of problem 0 takes 3 tokens with its end, more than config.{budget} (2); "
    assert _refused(config, tmp_path) == expected + "raise it, or drop the problem"
    config.update_from_flattened_dict({name: 3 for name in changes if name != "stages"})
    _check_all(config, tmp_path)


def test_some_references_of_an_evaluated_set_that_are_cut_are_counted(warnings):
    config = load_config()
    config.evaluate.max_answer_tokens = 5
    problems = SimpleNamespace(answers=[[0] * length for length in (2, 4, 5, 7)])
    check_answers(config, "config.data.eval.hard", problems, range(2))
    assert not warnings
    check_answers(config, "config.data.eval.hard", problems, range(4))
    (line,) = warnings
    assert line == (
        "config.data.eval.hard: the answers of 2 of 4 problems take more tokens than "
        "config.evaluate.max_answer_tokens (5), up to 8; they count as wrong"
    )
    config.max_answer_tokens = 7
    with pytest.raises(UserError, match=r"^config\.data\.train: the answer of problem 3 takes 8 tokens"):
        check_answers(config, "config.data.train", problems, range(4))


@pytest.mark.parametrize(
    "name",
    [
        *SECTIONS,
        "imitate_control",
        "imitate_fixed_tmax",
        "cold_start_best",
        "slpo_best",
        "imitate_adapter",
        "reasoner",
        "checkpoint",
    ],
)
def test_an_objective_can_t_have_the_name_of_another_stage_or_row(name, tmp_path):
    config = load_config()
    objective_variant(config, name, "answer_only")
    config.rl.objectives = ("slpo", name)
    line = _refused(config, tmp_path)
    assert line.startswith(f"config.objective.{name}: ")
    assert "use another" in line


def test_an_objective_s_own_rate_and_schedule_are_its_optimizer_s(tmp_path):
    config = load_config()
    config.rl.objectives = ("slpo", "answer_only")
    config.rl.optimizer.update(learning_rate=0.25, schedule="linear", final_fraction=0.5)
    config.objective.answer_only.update(learning_rate=0.125, schedule="constant", steps=50)
    config.objective.grpo.update(updates=3, steps=40)
    experiment = build(read_config(config), tmp_path / "work")
    found = [optimizer_config(experiment, make_objective(experiment, name)) for name in config.rl.objectives]
    several = optimizer_config(experiment, objective_of(experiment.config, "grpo"))
    experiment.log.close()
    assert [each.learning_rate for each in found] == [0.25, 0.125]
    assert [each.schedule for each in found] == ["linear", "constant"]
    assert [each.total_steps for each in found] == [config.rl.steps, 50]
    assert several.total_steps == 3 * 40  # a schedule counts updates
    assert {each.final_fraction for each in found} == {0.5}


@pytest.mark.parametrize("name", ["a/b", "", "a b"])
def test_an_objective_s_name_is_one_of_files(name, tmp_path):
    config = load_config()
    objective_variant(config, name, "answer_only")
    assert _refused(config, tmp_path).startswith(f"config.objective.{name}: ")


def test_a_variant_needs_a_kind(tmp_path):
    config = load_config()
    objective_variant(config, "mine", "slpo")
    config.objective.mine.kind = "slpp"
    assert _refused(config, tmp_path).startswith("config.objective.mine.kind: 'slpp' is not valid")
    with pytest.raises(UserError, match=r"^config.objective.mine.kind: 'slpp' is unknown; use one of slpo"):
        objective_variant(load_config(), "mine", "slpp")
    with pytest.raises(UserError, match=r"^config.objective.mine.passses"):
        objective_variant(load_config(), "mine", "slpo", passses=3)
    objective_variant(config, "mine", "slpo", passes="many")
    assert _refused(config, tmp_path).startswith("config.objective.mine.passes: 'many' is not valid")


@pytest.mark.parametrize(
    "changes",
    [
        {"objective.pathwise.estimator": "reward"},
        {"objective.pathwise.estimator": "mixture", "objective.pathwise.mixture_weight": 0.0},
        {"latent_policy.name": "additive"},
        {"gate.enabled": True},
    ],
)
def test_pathwise_where_something_is_drawn(changes, tmp_path):
    """An answer, nothing that is compared, a thought, or its length."""
    config, (asked, *_) = load_config(), CASES["pathwise on thoughts that are all one"]
    config.update_from_flattened_dict(asked | changes)
    _check_all(config, tmp_path)


def test_the_config_itself_is_fine(tmp_path):
    """Or every case above would be refused for nothing; under a name that a section of the config has, too."""
    config = load_config()
    objective_variant(config, "gate", "pathwise", estimator="reward")
    config.rl.objectives = ("slpo", "gate", "answer_only", "pathwise")
    _check_all(config, tmp_path)
