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
from slpo_jax.rewards.answers import STYLES, style_of
from slpo_jax.rewards.reward import CORRECT, REWARDS, RewardEntry

TRAIN, DEMOS, VALID, EVAL = "config.data.train", "config.data.demos", "config.data.valid", "config.data.eval."
LEARNED = (TRAIN, DEMOS)
# Other keys are asked for their test split.
_ROLES: dict[str, Role] = {TRAIN: "train", DEMOS: "train", VALID: "validation"}
_MOST = 160  # characters that are shown of a text that the model sees
_WHOLE = 1000  # and of a line of a problem


def load_set(
    config: Config, key: str, source: Any, texts: bool = False, entries: Sequence[RewardEntry] | None = None
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
        raise UserError(f"{key}: not set; give a file or a synthetic set such as synthetic:train")
    entries = [REWARDS[name] for name, _ in config.weighted] if entries is None else entries
    data, of_numbers = config.data, not texts and any(entry.function is None for entry in entries)
    columns_of, unanswered = [entry.columns for entry in entries], not any(entry.needs_answer for entry in entries)
    columns = None if None in columns_of else frozenset[str]().union(*filter(None, columns_of))
    kind = STYLES[style_of(config.prompt.answers, "after_mark")].kind if of_numbers else "texts"

    def load(name, source):
        with about(name):
            options = data.of_task(source), _ROLES.get(name, "test"), kind, data.fields, columns, unanswered
            return load_problems(source, *options)

    problems = load(key, source)
    if key in LEARNED and data.valid:
        # GSM8K's training file holds the validation questions; nothing may be chosen on problems trained on.
        total = len(problems)
        valid = load(VALID, data.valid)
        rest = without(problems, valid)
        # What is set apart from the source itself is no loss.
        count = total - len(rest) - (len(valid) if data.valid == f"{source}[valid]" else 0)
        warning = f"{key}: left out {count} of {total} problems, which are also in config.data.valid"
        problems = problems.with_only(rest, warnings=(*problems.warnings, *[warning] * (count > 0)))
    if not problems:
        raise UserError(f"{key}: every problem of {source} is also in config.data.valid; give another set")
    return problems


def learned_from(config: Config, texts: bool = False) -> list[Problem]:
    """Read all problems that a model learns from, whose words it is to know."""
    sources = {TRAIN: config.data.train} | ({DEMOS: config.data.demos} if config.data.demos else {})
    return [problem for key, source in sources.items() for problem in load_set(config, key, source, texts)]


def data_summary(
    key: str, problems: EncodedProblems, rewards: Sequence[tuple[str, float]] = ((CORRECT, 1.0),)
) -> list[str]:
    """Return one line, and others on the source's fields and, of training data, with an example.

    Args:
        key: `TRAIN`, `DEMOS`, `VALID` or `EVAL` with a name.
        rewards: `Config.weighted`.
    """
    judges = ", ".join(name for name, _ in rewards)
    answers = f"answers are {STYLES[problems.template.answer_style].about}"
    answers = answers if judges == CORRECT else f"answers are judged by {judges}"
    lines = _described(key, problems.problems, answers, key in LEARNED)
    return [*lines, f"  the first: {_example(problems)}"] if key in LEARNED else lines


def read_as(source: str, problems: Problems, answers: str) -> list[str]:
    """Say how a source was read, where no model is at hand.

    Args:
        source: what it is called.
        answers: what its answers are.
    """
    return [*_described(source, problems, f"answers are {answers}", True), *map("  {}".format, problems.warnings)]


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
    changes = {key: value for key, value in flatten(values(settings)).items() if value != default.get(key)}
    if not changes:
        return f"made with the defaults of {section}"
    return f"made with {section}: {', '.join(f'{key}={value}' for key, value in changes.items())}"


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Write problems as prompt, steps and answer."""
    lines = []
    for number, problem in enumerate(problems, start=1):
        steps, answer = problem.steps or ["none"], [problem.answer or "none"]
        parts = {"prompt": problem.question.split("\n"), "steps": steps, "answer": answer}
        for name, texts in parts.items():
            heads = [f"{number if name == 'prompt' else '':>3}  {name:<6}"] + [" " * 11] * (len(texts) - 1)
            lines += [f"{head}  {_shortened(text, _WHOLE)}" for head, text in zip(heads, texts, strict=True)]
    return lines


def _described(name: str, problems: Problems, answers: str, with_steps: bool) -> list[str]:
    """Return a line on a set's problems, and others on its fields."""
    counts, unanswered = [len(problem.steps) for problem in problems], sum(not problem.answer for problem in problems)
    facts = [f"{len(counts):,} problems"] + [f"{unanswered:,} without an answer"] * bool(unanswered)
    if with_steps:
        facts.append(f"{sum(counts) / len(counts):.1f} steps each")
        facts += [f"{counts.count(0):,} without steps"] * (0 in counts)
    return [f"{name}: {', '.join([*facts, answers])}", *map("  {}".format, problems.field_use.lines())]


def _example(problems: EncodedProblems) -> str:
    """Write the first problem as the model sees it: prompt | steps | answer, as its template writes them."""
    template, problem = problems.template, problems.problems[0]
    steps = "".join(template.step_text(step, place == 0) for place, step in enumerate(problem.steps))
    answer = template.answer_text(problem.answer) if problem.answer else ""
    texts = (template.question_text(problem.question), steps, answer)
    return " | ".join(_shortened(repr(text)) for text in texts)


def _shortened(text: str, most: int = _MOST) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} .. {text[-most // 2 :]}"
