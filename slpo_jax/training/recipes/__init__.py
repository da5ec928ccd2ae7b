"""The recipes of the stage `imitate`. A new one is a file here, a line in `RECIPES`, and its name in a config."""

import dataclasses

from slpo_jax.errors import UserError
from slpo_jax.settings import selection
from slpo_jax.training.recipes.adalr_recipe import AdaptiveLength
from slpo_jax.training.recipes.colar_recipe import Compression, StepPerLatent
from slpo_jax.training.recipes.curriculum import Curriculum, Internalization
from slpo_jax.training.recipes.distil import Dart, Distillation
from slpo_jax.training.recipes.frontier import Frontier
from slpo_jax.training.recipes.latent_sft import LatentSft
from slpo_jax.training.recipes.recipe import (
    ImitateSettings,
    Phase,
    Recipe,
    RecipeSettings,
    with_lora,
)
from slpo_jax.training.recipes.simcot import SimCot

RECIPES: dict[str, type[RecipeSettings]] = {
    "curriculum": Curriculum,
    "frontier": Frontier,
    "distil": Distillation,
    "icot": Internalization,
    "silent": Dart,
    "simcot": SimCot,
    "colar": Compression,
    "regular": StepPerLatent,
    "latent_sft": LatentSft,
    "adalr": AdaptiveLength,
}
"""By name the settings of a recipe (`config.imitate.NAME`), which make it: (`ImitateSettings`, default) -> `Recipe`."""


def imitate_config() -> ImitateSettings:
    """Make the section `config.imitate`: what all recipes share, and the settings of each of `RECIPES`."""
    settings: ImitateSettings = selection(ImitateSettings, "recipe", "", RECIPES)
    return settings


def recipe_of(
    settings: ImitateSettings, default: str, tokens: tuple[int, ...] = ()
) -> Recipe:
    """Make the recipe that `config.imitate` describes.

    Args:
        settings: of `imitate_config`.
        default: the name of the reasoner's own recipe.
        tokens: of `Template.trained_ids`.
    Raises:
        UserError: it is not to be used with these settings.
    """

    def make(name: str, *base: Recipe) -> Recipe:
        own_settings = getattr(settings, name)
        recipe = own_settings(settings, *base)
        return dataclasses.replace(recipe, name=name)

    recipe = make(settings.recipe or default, make(default))
    return with_lora(recipe, settings.lora, tokens) if settings.lora.rank else recipe


def check_ends(config: ImitateSettings, recipe: Recipe, phases: list[Phase]) -> None:
    """Refuse what makes no sense where stages end when they are learned, or are mixed.

    Raises:
        UserError: the key, and the remedy.
    """
    if config.mix and not RECIPES.get(recipe.name, RecipeSettings).has_stages:
        raise UserError(
            f"config.imitate.mix: {config.mix}, but {recipe.name} has no earlier stages to mix; set it to 0"
        )
    if config.stage_until and any(phase.rise or phase.trains for phase in phases):
        raise UserError(
            f"config.imitate.stage_until: {config.stage_until}, but {recipe.name} says itself when its phases end; set "
            "it to 0"
        )
    if (
        config.stage_until
        and config.optimizer.schedule != "constant"
        and not config.reset_optimizer
    ):
        raise UserError(
            f"config.imitate.optimizer.schedule: {config.optimizer.schedule} goes by the steps of all stages, which "
            "nobody knows with config.imitate.stage_until; set it to constant, or config.imitate.reset_optimizer=True"
        )


__all__ = ["RECIPES", "ImitateSettings", "Phase", "Recipe", "RecipeSettings", "check_ends", "imitate_config",
           "recipe_of"]  # fmt: skip
