"""The stages of a run, and the checkpoints that they leave: the one list of both, made from the config."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Config = Any  # of `config`, which builds on this module

Section = Literal["imitate", "cold_start", "best_of_n", "rl", "latent_rm", "evaluate"]
SECTIONS: tuple[Section, ...] = get_args(Section)
"""What `config.stages` may hold, in this order: sections of the config. `run/SECTION.py` checks and trains each."""

IMITATE, COLD_START, BEST_OF_N, RL, LATENT_RM, EVALUATE = SECTIONS
USUAL: tuple[Section, ...] = (IMITATE, COLD_START, RL, EVALUATE)
USUAL_START = COLD_START, IMITATE
CONTROL = "imitate_control"
NO_THOUGHT = "imitate_no_thought"
UNFINISHED = "imitate_adapter"
"""Where imitation runs whose recipe has parts of its own, until it is finished into `IMITATE`'s checkpoint."""


@dataclass(frozen=True)
class About:
    """What others have to know of a section.

    Attributes:
        stream: of its noise. A number never changes, or runs that go on would draw other noise: a new one is the next.
        title: of what it trains, on model cards; "": no reasoner.
        gate: whether the gate of its checkpoints is a trained one.
        row: label and meaning of its row in the report; None: `run/rows.py` has more to say.
    """

    stream: int
    title: str = ""
    gate: bool = False
    row: tuple[str, str] | None = None


ABOUT: dict[Section, About] = {
    "imitate": About(0, "imitation (CoT-SFT and the latent curriculum or self-distillation)"),
    "cold_start": About(
        1,
        "cold start of the stopping gate",
        gate=True,
        row=("cold gate", "Imitation's reasoner with the trained gate: where the objectives start."),
    ),
    "best_of_n": About(
        5,
        "imitation of the best of its own right samples",
        gate=True,
        row=("best of N", "Imitation of the best right one among N samples of where it started, chosen by a scorer."),
    ),
    "rl": About(2, "reinforcement learning", gate=True),
    "latent_rm": About(4),
    "evaluate": About(3),
}
REASONERS = tuple(section for section, about in ABOUT.items() if about.title)
"""Sections that train a reasoner, in order."""
TITLES = {section: ABOUT[section].title for section in REASONERS} | {
    CONTROL: "further imitation, a control",
    NO_THOUGHT: "imitation without latents, a baseline",
}


@dataclass(frozen=True)
class Stage:
    """What leaves one checkpoint.

    Attributes:
        name: of the checkpoint; the stage rl leaves one for each objective, under the objective's name.
        section: that it is part of.
        after: names of those that it starts from, the first that is there or is going to be.
        wanted: whether the config asks for it.
    """

    name: str
    section: Section
    after: tuple[str, ...]
    wanted: bool


def stages_of(config: Config) -> tuple[Stage, ...]:
    """All stages that a config names, in the order in which they are run; objectives that are not asked for last."""
    asked = {section: section in config.stages for section in SECTIONS}
    own = [
        Stage(IMITATE, "imitate", (), asked[IMITATE]),
        Stage(UNFINISHED, "imitate", (), False),
        Stage(CONTROL, "imitate", (IMITATE,), asked[IMITATE] and config.imitate.control),
        Stage(NO_THOUGHT, "imitate", (), asked[IMITATE] and config.imitate.no_thought),
        Stage(COLD_START, "cold_start", (IMITATE,), asked[COLD_START]),
        Stage(BEST_OF_N, "best_of_n", USUAL_START, asked[BEST_OF_N]),
    ]
    names = dict.fromkeys((*config.rl.objectives, *config.objective))
    wanted = config.rl.objectives if asked[RL] else ()
    judge = Stage(LATENT_RM, "latent_rm", _after(config.latent_rm.after), asked[LATENT_RM])
    objectives = [_objective(config, name, name in wanted) for name in names]
    return (*own, *objectives[: len(wanted)], judge, *objectives[len(wanted) :])


def stage_of(config: Config, name: str) -> Stage:
    """The stage of a checkpoint's name; one that the config doesn't know was an objective's."""
    return next((stage for stage in stages_of(config) if stage.name == name), _objective(config, name, False))


def wanted(config: Config, finished: Iterable[str] = ()) -> list[Stage]:
    """The stages that the config asks for, but those of these names."""
    done = set(finished)
    return [stage for stage in stages_of(config) if stage.wanted and stage.name not in done]


def _objective(config: Config, name: str, is_wanted: bool) -> Stage:
    own = config.objective.get(name)
    return Stage(name, "rl", _after("" if own is None else own.after), is_wanted)


def _after(name: str) -> tuple[str, ...]:
    return (name,) if name else USUAL_START
