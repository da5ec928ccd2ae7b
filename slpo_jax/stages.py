"""The stages of a run, and the checkpoints that they leave: the one list of both."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

Config = Any  # of `config`, which builds on this module

Section = Literal["imitate", "cold_start", "best_of_n", "rl", "latent_rm", "evaluate"]
SECTIONS: tuple[Section, ...] = get_args(Section)
"""What `config.stages` may hold, in this order: sections of the config. `run/run_stages.py` has the file of each."""

IMITATE: Section = "imitate"
COLD_START: Section = "cold_start"
BEST_OF_N: Section = "best_of_n"
RL: Section = "rl"
LATENT_RM: Section = "latent_rm"
EVALUATE: Section = "evaluate"

USUAL: tuple[Section, ...] = (IMITATE, COLD_START, RL, EVALUATE)
CONTROL = "imitate_control"
NO_THOUGHT = "imitate_no_thought"
IMITATE_SCRATCH = {IMITATE: "imitate_adapter", CONTROL: "imitate_control_adapter"}
"""Where a stage of imitation runs whose recipe has parts of its own, until it is finished into its own checkpoint."""


@dataclass(frozen=True)
class About:
    """The facts of a section that others have to know.

    Attributes:
        stream: the number of its noise, which never changes, or runs that go on would draw other noise. That of a new
            section is one more than the largest.
        starts_from: the sections that it may start from: the first that is trained, else `config.init`.
        trains_reasoner: whether its checkpoint is a reasoner; its section then has `steps`, `batch_size`,
            `micro_batches` and `optimizer`.
        validates: whether it validates every `evaluate_every` steps, and keeps the parameters that were best.
        rewarded: whether it learns from what a verifier says. The row of a section that doesn't may be the control of
            the rows that it is compared with.
        row: label and meaning of its row in the report; None: `run/experiment.py` has more to say.
    """

    stream: int
    starts_from: tuple[Section, ...] = (COLD_START, IMITATE)
    trains_reasoner: bool = False
    validates: bool = False
    rewarded: bool = True
    row: tuple[str, str] | None = None


ABOUT: dict[Section, About] = {
    # Imitation validates in its own way, by phases.
    IMITATE: About(0, starts_from=(), trains_reasoner=True, rewarded=False),
    COLD_START: About(
        1,
        starts_from=(IMITATE,),
        trains_reasoner=True,
        validates=True,
        row=(
            "cold gate",
            "Imitation's reasoner with the trained gate: where the objectives start.",
        ),
    ),
    BEST_OF_N: About(
        5,
        trains_reasoner=True,
        row=(
            "best of N",
            "Imitation of the best right one among N samples of where it started, chosen by a scorer.",
        ),
    ),
    RL: About(2, trains_reasoner=True, validates=True),
    LATENT_RM: About(4, validates=True),
    EVALUATE: About(3),
}
REASONER_STAGES = tuple(
    section for section in SECTIONS if ABOUT[section].trains_reasoner
)
"""Sections that train a reasoner, in order."""

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
