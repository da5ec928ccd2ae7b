"""The problems of a run: read from their sources, and what was understood of them, in lines."""

from collections.abc import Iterable, Sequence
from typing import Any

from slpo_jax.config.config import Config
from slpo_jax.config.overrides import values
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.generated import task_of
from slpo_jax.data.generated_sets import is_gym
from slpo_jax.data.problem import Problem, Problems, without
from slpo_jax.data.problems import Role, load_problems
from slpo_jax.errors import UserError, about
from slpo_jax.io.files import flatten
from slpo_jax.rewards.answers import STYLES, Kind, style_of
from slpo_jax.rewards.reward import CORRECT, REWARDS, RewardEntry

TRAIN = "config.data.train"
DEMOS = "config.data.demos"
VALID = "config.data.valid"
EVAL = "config.data.eval."
LEARNED = (TRAIN, DEMOS)
# Other keys are asked for their test split.
_ROLES: dict[str, Role] = {TRAIN: "train", DEMOS: "train", VALID: "validation"}
_MOST = 160  # characters that are shown of a text that the model sees
_WHOLE = 1000  # and of a line of a problem


def load_set(
    config: Config,
    key: str,
    source: Any,
    texts: bool = False,
    entries: Sequence[RewardEntry] | None = None,
) -> Problems:
    """Read the problems of a key's source, of training problems without those that validation has too.

    Args:
        config: how sources are read; its `data.valid` is what training problems must not have.
        source: as `load_problems` takes it.
        texts: answers may be any; else those that the rewards can judge, by `config.prompt.answers`.
        entries: rewards that judge them; None: the config's. What these ask for is kept of each record, and problems
            without an answer are, where they need none.
    Raises:
        UserError: the key, and what is wrong with its source.
    """
    if isinstance(source, str) and not source:
        raise UserError(
            f"{key}: not set; give a file or a synthetic set such as synthetic:train"
        )
    if entries is None:
        entries = [REWARDS[name] for name, _ in config.weighted]
    data = config.data
    # The rewards say which of a record's columns are kept (None is all), and whether it needs an answer.
    columns: frozenset[str] | None = frozenset()
    for entry in entries:
        if columns is None or entry.columns is None:
            columns = None
        else:
            columns |= entry.columns
    unanswered = not any(entry.needs_answer for entry in entries)
    # Without a function of its own, a reward compares answers of one kind.
    kind: Kind = "texts"
    if not texts and any(entry.function is None for entry in entries):
        kind = STYLES[style_of(config.prompt.answers, "after_mark")].kind

    def load(name, source):
        task = data.of_task(source)
        role = _ROLES.get(name, "test")
        with about(name):
            return load_problems(
                source, task, role, kind, data.fields, columns, unanswered
            )

    problems = load(key, source)
    if key in LEARNED and data.valid:
        # GSM8K's training file holds the validation questions; nothing may be chosen on problems trained on.
        total = len(problems)
        valid = load(VALID, data.valid)
        rest = without(problems, valid)
        count = total - len(rest)
        # Problems that were set apart from the source itself are not lost.
        if data.valid == f"{source}[valid]":
            count -= len(valid)
        warnings = problems.warnings
        if count > 0:
            warning = f"{key}: left out {count} of {total} problems, which are also in config.data.valid"
            warnings = (*warnings, warning)
        problems = problems.with_only(rest, warnings=warnings)
    if not problems:
        raise UserError(
            f"{key}: every problem of {source} is also in config.data.valid; give another set"
        )
    return problems


def learned_from(config: Config, texts: bool = False) -> list[Problem]:
    """Read all problems that a model learns from, and whose words it must know."""
    problems = list(load_set(config, TRAIN, config.data.train, texts))
    if config.data.demos:
        problems += load_set(config, DEMOS, config.data.demos, texts)
    return problems


def data_summary(
    key: str,
    problems: EncodedProblems,
    rewards: Sequence[tuple[str, float]] = ((CORRECT, 1.0),),
) -> list[str]:
    """Return one line, and others on the source's fields and, of training data, with an example.

    Args:
        key: `TRAIN`, `DEMOS`, `VALID` or `EVAL` with a name.
        rewards: `Config.weighted`.
    """
    judges = ", ".join(name for name, _ in rewards)
    answers = f"answers are judged by {judges}"
    if judges == CORRECT:
        answers = f"answers are {STYLES[problems.template.answer_style].about}"
    is_learned = key in LEARNED
    lines = _describe(key, problems.problems, answers, is_learned)
    if is_learned:
        lines.append(f"  the first: {_write_example(problems)}")
    return lines


def read_as(source: str, problems: Problems, answers: str) -> list[str]:
    """Say how a source was read, where no model is at hand.

    Args:
        source: what it is called.
        answers: what its answers are.
    """
    lines = _describe(source, problems, f"answers are {answers}", True)
    return lines + [f"  {warning}" for warning in problems.warnings]


def made_with(source: Any, settings: Any = None) -> str:
    """Say with which settings a generated set is made; "" for other sources.

    Args:
        source: what is read.
        settings: of its task, as the config has them; None is the defaults.
    """
    task = "gym" if is_gym(source) else task_of(source)
    if not task:
        return ""
    section = f"config.data.{task}"
    if settings is None:
        return f"made with the defaults of {section}; a run may have others: r.problems(NAME), slpo data RUN NAME"
    default = flatten(values(type(settings)()))
    changes = []
    for key, value in flatten(values(settings)).items():
        if value != default.get(key):
            changes.append(f"{key}={value}")
    if not changes:
        return f"made with the defaults of {section}"
    return f"made with {section}: {', '.join(changes)}"


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Write problems as prompt, steps and answer."""
    lines = []
    for number, problem in enumerate(problems, start=1):
        parts = {
            "prompt": problem.question.split("\n"),
            "steps": problem.steps or ["none"],
            "answer": [problem.answer or "none"],
        }
        # A problem's number stands before its prompt, a part's name before its first line.
        for name, texts in parts.items():
            head = f"{number if name == 'prompt' else '':>3}  {name:<6}"
            for text in texts:
                lines.append(f"{head}  {_shorten(text, _WHOLE)}")
                head = " " * 11
    return lines


def _describe(
    name: str, problems: Problems, answers: str, with_steps: bool
) -> list[str]:
    """Return a line on a set's problems, and others on its fields."""
    counts = [len(problem.steps) for problem in problems]
    facts = [f"{len(counts):,} problems"]
    unanswered = sum(not problem.answer for problem in problems)
    if unanswered:
        facts.append(f"{unanswered:,} without an answer")
    if with_steps:
        facts.append(f"{sum(counts) / len(counts):.1f} steps each")
    if with_steps and 0 in counts:
        facts.append(f"{counts.count(0):,} without steps")
    lines = [f"{name}: {', '.join([*facts, answers])}"]
    return lines + [f"  {line}" for line in problems.field_use.lines()]


def _write_example(problems: EncodedProblems) -> str:
    """Write the first problem as the model sees it: prompt | steps | answer, as its template writes them."""
    template = problems.template
    problem = problems.problems[0]
    steps = ""
    for place, step in enumerate(problem.steps):
        steps += template.step_text(step, place == 0)
    answer = template.answer_text(problem.answer) if problem.answer else ""
    texts = (template.question_text(problem.question), steps, answer)
    return " | ".join(_shorten(repr(text)) for text in texts)


def _shorten(text: str, most: int = _MOST) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} .. {text[-most // 2 :]}"
