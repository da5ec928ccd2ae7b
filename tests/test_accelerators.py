"""Programs of every stage, reasoner, objective, latent policy and type, lowered for devices that are not here."""

import itertools
import json
import re

import jax
import pytest

from benchmarks.measure.programs import programs
from slpo_jax.architectures import ARCHITECTURES, REASONERS
from slpo_jax.config import default_config, read_config
from slpo_jax.evaluation.curves import scalars
from slpo_jax.models import xla_cpu
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.run.setup import assemble
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.recipes import RECIPES

DTYPES = ("bfloat16", "float32")
BACKBONES = ("gpt2", "llama")  # Qwen2 is Llama's program and biases
UNLIKELY = tuple(
    name for name, settings in LATENT_POLICIES.items() if not settings.has_likelihood
)
OF_LATENTS = ("latent", "additive")
IN_WORDS = ("hybrid",)
OF_ONE = ("colar", "adalr")
RECIPE_OF = {"curriculum": "coconut", "silent": "dart", "distil": "codi", "icot": "text", "simcot": "coconut",
             "colar": "colar", "regular": "colar", "latent_sft": "text", "frontier": "coconut",
             "adalr": "adalr"}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _for_accelerators():
    with xla_cpu.made_for("tpu"):  # and so not for a CPU
        yield


def _accepted(architecture: str, latent_policy: str, objective: str) -> bool:
    """Whether a config may ask for the three together; tests of bad configs hold the others' errors."""
    if latent_policy in OF_ONE:
        return architecture == latent_policy
    if architecture != "text":
        return latent_policy not in IN_WORDS and not (
            objective == "exact" and latent_policy in UNLIKELY
        )
    if latent_policy in OF_LATENTS or (
        latent_policy in IN_WORDS and objective not in ("exact", "grpo")
    ):
        return False
    return not (latent_policy in UNLIKELY and objective in ("exact", "grpo"))


def _rl_cases():
    """Every latent policy with every objective in latents and in words, over reasoners and types in turn.

    Quick are two; the others that have something once are slow, and the rest nightly.
    """
    latent_architectures = itertools.cycle(
        architecture for architecture in ARCHITECTURES if architecture != "text"
    )
    turns = itertools.cycle(itertools.product(DTYPES, BACKBONES))
    seen = set[str]()
    for latent_policy, objective in itertools.product(LATENT_POLICIES, OBJECTIVES):
        for architecture in (
            (latent_policy,)
            if latent_policy in OF_ONE
            else (next(latent_architectures), "text")
        ):
            if _accepted(architecture, latent_policy, objective):
                dtype, backbone = next(turns)
                new = {latent_policy, objective, f"{architecture}_{backbone}"} - seen
                seen |= new
                quick = (latent_policy, objective) in (
                    ("latent", "slpo"),
                    ("colar", "exact"),
                )
                marks = (
                    () if quick else pytest.mark.slow if new else pytest.mark.nightly
                )
                yield pytest.param(
                    f"{architecture}_{backbone}",
                    latent_policy,
                    objective,
                    dtype,
                    marks=marks,
                )


def _other_cases():
    """The other stages: of every reasoner, every recipe and, evaluated, every latent policy.

    Quick are three; of the others those on one of the backbones are slow, and the rest nightly.
    """
    turns = itertools.cycle(itertools.product(BACKBONES, DTYPES))

    def case(
        stage: str,
        architecture: str,
        backbone: str,
        latent_policy: str,
        recipe: str,
        dtype: str,
    ):
        quick = (stage, architecture, recipe) in (
            ("cold_start", "codi", ""),
            ("imitate", "codi", "distil"),
        )
        quick = (quick or latent_policy == "hybrid") and (backbone, architecture) != (
            "gpt2",
            "codi",
        )
        once = (
            latent_policy not in ("latent", "soft")
            or backbone == ("llama", "gpt2")[len(architecture) % 2]
        )
        marks = () if quick else pytest.mark.slow if once else pytest.mark.nightly
        return pytest.param(
            stage,
            f"{architecture}_{backbone}",
            latent_policy,
            recipe,
            dtype,
            marks=marks,
        )

    for architecture in ARCHITECTURES:
        stages = (
            ["cold_start", "evaluate"]
            if ARCHITECTURES[architecture].has_gate
            else ["evaluate"]
        )
        for stage, backbone in itertools.product(stages, BACKBONES):
            yield case(
                stage,
                architecture,
                backbone,
                "soft" if architecture == "text" else "latent",
                "",
                next(turns)[1],
            )
    for latent_policy in LATENT_POLICIES:
        backbone, dtype = next(turns)
        if latent_policy in OF_ONE:
            architecture = latent_policy
        else:
            architecture = "coconut" if latent_policy in OF_LATENTS else "text"
        yield case("evaluate", architecture, backbone, latent_policy, "", dtype)
    for recipe, backbone in itertools.product(RECIPES, BACKBONES):
        latent_policy = "adalr" if recipe == "adalr" else "soft"
        yield case(
            "imitate",
            RECIPE_OF[recipe],
            backbone,
            latent_policy,
            recipe,
            next(turns)[1],
        )


def _config(reasoner: str, latent_policy: str, dtype: str):
    config = default_config()
    config.reasoner = reasoner
    config.tokenizer = "synthetic:20"
    config.latent_policy.name = latent_policy
    config.model.update(
        n_layer=1, n_head=2, n_embd=16, n_positions=64, projector=8, dtype=dtype
    )
    config.update(max_latents=3, min_latents=1, prompt_slots=(20,), max_answer_tokens=5)
    config.gate.enabled = REASONERS[reasoner][0].has_gate
    config.data.train = "synthetic:train"
    config.data.synthetic.update(
        train_size=64, valid_size=4, test_size=4, max_value=20, max_steps=2
    )
    config.imitate.update(
        batch_size=2,
        c_thought=1,
        max_latent_stage=1,
        cot_steps=0,
        stage_steps=0,
        final_steps=4,
    )
    config.cold_start.update(batch_size=2, micro_batches=1, trajectories=2)
    config.rl.update(batch_size=2, group=2, capacities=((1.0, 1.0),), temperature=1.0)
    config.evaluate.batch_size = 4
    return config


def _held(jaxpr):
    """The arrays on a device that a program closes over: to compile it they are fetched, which a step may not do."""
    yield from (
        value for value in getattr(jaxpr, "consts", ()) if isinstance(value, jax.Array)
    )
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield from (
            value.val
            for value in equation.invars
            if isinstance(getattr(value, "val", None), jax.Array)
        )
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _held(inner)


def _lowered(config, stage: str) -> list[str]:
    """The text of each program."""
    config.stages = (stage,)
    setup = assemble(read_config(config), devices=jax.devices("cpu")[:1])
    exported = []
    for each in programs(setup, stage):
        assert [*_held(each.function.trace(*each.arguments).jaxpr)] == []
        exported.append(
            jax.export.export(each.function, platforms=("cuda", "tpu"))(*each.arguments)
        )
    assert exported
    assert all(each.platforms == ("cuda", "tpu") for each in exported)
    outputs = [
        jax.tree.unflatten(each.out_tree, [None] * each.out_tree.num_leaves)
        for each in exported
    ]
    logged = {
        name
        for made in outputs
        for name in (made[1] if isinstance(made, tuple) else ())
    }
    assert not logged - {*scalars(), "counts", "skipped_in_a_row"}, (
        "logged, and defined nowhere"
    )
    return [each.mlir_module() for each in exported]


def _is_plain(text: str) -> bool:
    """Whether it has none of a CPU's forms, and asks the host for nothing."""
    return not re.search(r"\bcpu_\w+|callback", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reasoner", "latent_policy", "objective", "dtype"), [*_rl_cases()]
)
def test_an_rl_step_is_lowered_in_its_plain_form(
    reasoner, latent_policy, objective, dtype
):
    config = _config(reasoner, latent_policy, dtype)
    config.rl.objectives = (objective,)
    config.dropout.rate = 0.0 if objective in ("exact", "grpo") else 0.1
    assert all(map(_is_plain, _lowered(config, "rl")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "reasoner", "latent_policy", "recipe", "dtype"), [*_other_cases()]
)
def test_the_other_stages_are_lowered_in_their_plain_form(
    tmp_path, stage, reasoner, latent_policy, recipe, dtype
):
    config = _config(reasoner, latent_policy, dtype)
    config.imitate.update(recipe=recipe, c_thought=int(recipe != "icot"))
    config.imitate.distil.last_step = True
    config.imitate.adalr.update(last_step=True, latents=2)
    if recipe == "icot":
        config.max_latents = 0
        config.imitate.final_steps = 1000
    if reasoner.startswith("colar"):
        config.prompt_slots = (30,)
        config.prompt.speed = 1
    if recipe == "latent_sft":
        config.prompt.update(format="{question}\n<think>", closing="</think>")
    if recipe == "frontier":
        graph = {
            "edges": [[0, 1], [2, 3]],
            "root": 0,
            "target": 1,
            "neg_target": 3,
            "neighbor_k": {"1": [1]},
        }
        (tmp_path / "graphs.json").write_text(json.dumps([graph]))
        config.data.train = str(tmp_path / "graphs.json")
        config.data.fields.question = "edges"
        config.tokenizer = "nodes:9"
        config.prompt.update(format="<eos> {question}", closing="[A]")
    assert all(map(_is_plain, _lowered(config, stage)))
