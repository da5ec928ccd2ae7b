"""What the stage imitate is going to do: its phases, their optimizers, and the problems that are imitated."""

import dataclasses

import numpy as np

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.run.run_checks import check_answers
from slpo_jax.run.setup import Setup
from slpo_jax.run.sources import DEMOS, TRAIN
from slpo_jax.stages import IMITATE, NO_THOUGHT
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.recipes import (
    ImitateSettings,
    Phase,
    Recipe,
    check_ends,
    recipe_of,
)
from slpo_jax.training.recipes.recipe import usable


def choose_problems(
    setup: Setup, recipe: Recipe, phases: list[Phase]
) -> EncodedProblems:
    """Choose the training problems that are imitated.

    Raises:
        UserError: there are none, an answer does not fit in config.max_answer_tokens, none has steps where steps are
            written, or one needs more positions than the model has, which that key does not bound.
    """
    problems = setup.demos
    longest = setup.config.imitate.max_tokens
    key = DEMOS if setup.config.data.demos else TRAIN

    # Only what has an answer is imitated, and what the recipe can use.
    answered = {
        place for place, problem in enumerate(problems.problems) if problem.answer
    }
    if not answered:
        raise UserError(
            f"config.stages: imitate, but none of the {len(problems)} problems of {key} has an answer to "
            "imitate; take it out, or give answers, or other problems to imitate as config.data.demos"
        )
    places = [place for place in recipe.usable(problems, longest) if place in answered]
    if not places:
        raise UserError(
            f"config.imitate.max_tokens: {longest} leaves no problem of {key}; raise it or give other data"
        )
    check_answers(
        key, problems, places, "max_answer_tokens", setup.config.max_answer_tokens
    )
    chosen = problems.subset(places)

    # Where steps are written, or become latents, some problem has to have them.
    fewest = recipe.fewest_steps(phases)
    if max(map(len, chosen.steps)) < fewest:
        why = (
            ""
            if fewest == 1
            else ", of which CODI's teacher leaves out the last (config.imitate.distil.last_step)"
        )
        raise UserError(
            f"{key}: none of its {len(chosen)} problems has {fewest} step(s) to imitate{why}; give "
            "solutions in a field that docs/data.md names, other problems to imitate as config.data.demos, or for "
            "answers alone 0 for config.imitate.cot_steps and stage_steps"
        )

    # In every phase every problem fits the model's positions.
    most = setup.reasoner.config.n_positions
    for phase in phases:
        needed = [positions for positions, *_ in recipe.needs(chosen, phase)]
        if max(needed) > most:
            raise UserError(
                f"config.model.n_positions: {most} is less than the {max(needed)} positions of problem "
                f"{places[int(np.argmax(needed))]} in imitation's phase {phase.name}; raise it, lower "
                "config.imitate.max_tokens or drop the problem"
            )
    return chosen


def imitate_settings_of(settings: ImitateSettings, name: str) -> ImitateSettings:
    """Return the settings of one of the stage's runs: without latents, those of a thought have their off values."""
    if name != NO_THOUGHT:
        return settings
    without_thought = dataclasses.replace(
        settings, recipe="curriculum", c_thought=0, final_latents="published"
    )
    return dataclasses.replace(
        without_thought, stage_until=0.0, mix=0.0, gate_weight=0.0
    )


def plan_phases(
    setup: Setup, name: str = IMITATE
) -> tuple[Recipe, list[Phase], list[OptimizerConfig]]:
    """Plan how the reasoner imitates, the stage's phases, and the optimizer of each.

    Args:
        name: of the stage's run.
    Raises:
        UserError: there are no steps, a phase has fewer steps than its warm-up, or *no latents* can't be trained beside
            what is trained.
    """
    config = imitate_settings_of(setup.config.imitate, name)
    recipe = recipe_of(config, config.recipe) if name == NO_THOUGHT else setup.recipe
    phases = recipe.phases(setup.demos, setup.config.max_latents)
    if not phases:
        raise UserError(
            "config.imitate.final_steps: the stage has no steps; give some or take it out of config.stages"
        )
    if name == NO_THOUGHT:
        check_no_thought(setup, recipe, phases)
    check_ends(config, recipe, phases)

    # A schedule goes through the steps from one reset of the optimizer to the next: those of all phases, of one phase,
    # or between two tokens that iCoT drops. A phase that trains parts of its own begins with a reset.
    optimizer_configs = []
    for phase in phases:
        steps = phase.end - phase.start
        if not config.reset_optimizer and not phase.trains:
            steps = phases[-1].end
        elif config.reset_optimizer and phase.rise:
            steps = phase.rise
        rate = {}
        if phase.learning_rate is not None:
            rate["learning_rate"] = phase.learning_rate
        optimizer_configs.append(setup.optimizer_config(IMITATE, steps, **rate))
    return recipe, phases, optimizer_configs


def check_no_thought(setup: Setup, recipe: Recipe, phases: list[Phase]) -> None:
    """Refuse *no latents* where it would train other parameters, or in other steps.

    Args:
        recipe: of *no latents*.
        phases: its own.
    """
    if recipe.has_extra_parameters:
        raise UserError(
            "config.imitate.no_thought: True, which trains the whole reasoner, but lora.rank trains adapters; set it "
            "to False, or leave that out"
        )
    # With extra parameters the curriculum of *no latents* stands in for another recipe, whose steps may be others.
    thinking = setup.recipe
    if not thinking.has_extra_parameters:
        return
    steps = thinking.phases(setup.demos, setup.config.max_latents)[-1].end
    if steps != phases[-1].end:
        raise UserError(
            f"config.imitate.no_thought: True, which takes {phases[-1].end} steps in the curriculum's stages, but "
            f"{thinking.name} takes {steps}; set it to False, or train no latents in a run of its own"
        )


def left_out(problems: EncodedProblems, count: int, most: int, recipe: str) -> str:
    """Tell why some problems are not imitated, each cause with its number; "" where all are.

    Args:
        count: how many are.
        most: `config.imitate.max_tokens`.
    """
    answered = {
        place for place, problem in enumerate(problems.problems) if problem.answer
    }
    # The usual choice goes by lengths alone.
    short = answered.intersection(usable(problems, most))
    causes = {
        "without an answer": len(problems) - len(answered),
        f"longer than config.imitate.max_tokens={most}": len(answered) - len(short),
        f"that {recipe} leaves out, as CODI does negative answers": len(short) - count,
    }
    return ", ".join(f"{number} {cause}" for cause, number in causes.items() if number)
