"""Questions asked at a thinking speed, as CoLaR's are: tokens of a written solution that one latent stands for."""

import dataclasses
from typing import TYPE_CHECKING

from slpo_jax.errors import UserError

if TYPE_CHECKING:
    from slpo_jax.data.templates import Template

MOST_SPEED = 5  # published


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question's text."""

    speed: int

    def __call__(self, question: str) -> str:
        return f"Question: {question} Let's think step by step:(Thinking speed: {self.speed})"


def speed_of(template: "Template") -> int:
    """That it asks at.

    Raises:
        UserError: at none.
    """
    if not isinstance(template.question_text, Asked):
        raise UserError("config.reasoner: only CoLaR's is asked at a speed; set it to colar_gpt2 or another colar's")
    return template.question_text.speed


def at_speed(template: "Template", speed: int) -> "Template":
    """The template, asking at another."""
    return dataclasses.replace(template, question_text=Asked(speed))
