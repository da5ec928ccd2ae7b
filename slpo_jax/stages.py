"""The stages of a run, and the checkpoints that they leave: the one list of both."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

Config = Any  # of `config`, which builds on this module

Section = Literal["imitate", "cold_start", "best_of_n", "rl", "latent_rm", "evaluate"]
SECTIONS: tuple[Section, ...] = get_args(Section)
"""What `config.stages` may hold, in this order: sections of the config. `run/run_stages.py` has the file of each."""

IMITATE, COLD_START, BEST_OF_N, RL, LATENT_RM, EVALUATE = SECTIONS
USUAL: tuple[Section, ...] = (IMITATE, COLD_START, RL, EVALUATE)
USUAL_START = COLD_START, IMITATE
REASONER_STAGES = IMITATE, COLD_START, BEST_OF_N, RL
"""Sections that train a reasoner, in order."""
CONTROL = "imitate_control"
NO_THOUGHT = "imitate_no_thought"
IMITATE_SCRATCH = {IMITATE: "imitate_adapter", CONTROL: "imitate_control_adapter"}
"""Where a stage of imitation runs whose recipe has parts of its own, until it is finished into its own checkpoint."""


@dataclass(frozen=True)
class About:
    """The facts of a section that others have to know.

    Attributes:
        stream: the number of its noise, which never changes, or runs that go on would draw other noise. A new section
            has the next one.
        row: label and meaning of its row in the report; None: `run/experiment.py` has more to say.
    """

    stream: int
    row: tuple[str, str] | None = None


ABOUT: dict[Section, About] = {
    "imitate": About(0),
    "cold_start": About(
        1,
        row=(
            "cold gate",
            "Imitation's reasoner with the trained gate: where the objectives start.",
        ),
    ),
    "best_of_n": About(
        5,
        row=(
            "best of N",
            "Imitation of the best right one among N samples of where it started, chosen by a scorer.",
        ),
    ),
    "rl": About(2),
    "latent_rm": About(4),
    "evaluate": About(3),
}
# Checkpoints of imitation beside its own one.
_PARTS = {
    CONTROL,
    NO_THOUGHT,
    *IMITATE_SCRATCH.values(),
}


def section_of(name: str) -> Section:
    """Return the section that leaves a checkpoint of this name; a name that is nobody's own is an objective's."""
    for section in SECTIONS:
        if section == name:
            return section
    return IMITATE if name in _PARTS else RL


def wanted_stages(config: Config) -> list[str]:
    """Return the names of the checkpoints that a config asks for, in the order in which they are trained."""
    names = list[str]()
    for section in SECTIONS:
        # A section leaves one checkpoint of its name, but rl one for each objective, and evaluation none.
        if section not in config.stages or section == EVALUATE:
            continue
        if section == RL:
            names += config.rl.objectives
        else:
            names.append(section)
        if section == IMITATE and config.imitate.control:
            names.append(CONTROL)
        if section == IMITATE and config.imitate.no_thought:
            names.append(NO_THOUGHT)
    return names
