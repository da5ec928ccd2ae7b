"""AdaLR's imitation against the same losses written in torch, one unpadded row at a time, on transformers' models."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import tiny
import tiny_llama
from codi_run import PROBLEMS, ROWS, new_tokenizer
from slpo_jax.architectures.adalr import Adalr
from slpo_jax.config import default_config, read_config
from slpo_jax.data.batches import encode_problems
from slpo_jax.errors import UserError
from slpo_jax.models.lora import LoraConfig
from slpo_jax.policy.policy import RolloutConfig
from slpo_jax.training.recipes import ImitateSettings
from slpo_jax.training.recipes.adalr_recipe import AdaptiveLength
from slpo_jax.training.recipes.recipe import with_lora
from tiny import compiled, load_hf, load_projector, policy_of, random_tree
from tiny_llama import load_hf_llama

SETTINGS = AdaptiveLength(
    teacher_factor=0.7, distil_factor=3.0, latents=1, latents_a_step=1, most=3
)
LENGTHS = [3, 2, 3, 1]  # of `ROWS`, which have 3, 1, 2 and 0 steps
TEMPERATURE = 1.5


@pytest.fixture(
    scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)]
)
def case(request, tmp_path_factory):
    """A model, problems in tokens of either kind, and one batch of all of them."""
    digits = request.param == "llama"
    tokenizer = new_tokenizer(tmp_path_factory, digits=digits)
    template = Adalr().template(tokenizer)
    base = tiny_llama.LLAMA if digits else tiny.CONFIG
    config = dataclasses.replace(
        base, vocab_size=len(tokenizer), n_layer=2 if digits else 1
    )
    reasoner = Adalr().on(config)
    params = {"reasoner": random_tree(reasoner), "gate": tiny.random_gate()}
    problems = encode_problems(template, PROBLEMS)
    recipe = SETTINGS(ImitateSettings(cot_steps=2, final_steps=5))
    cot, last = recipe.phases(problems, 8)
    assert (cot.end, last.latent_slots, last.end) == (2, 3, 7)
    batch = recipe.batch(problems, last, 3, 1, 4, (32,), recipe.slots(problems, last))
    return SimpleNamespace(
        reasoner=reasoner,
        params=params,
        batch=batch,
        digits=digits,
        template=template,
        recipe=recipe,
    )


def _policy(case):
    t = case.template
    rollouts = RolloutConfig(3, 8, t.closing_ids, t.eos_ids, t.pad_id, dropout_rate=0.0)
    ids = {
        f"{name}_id": t.token(f"<|{name.upper()}|>") for name in ("continue", "stop")
    }
    policy = policy_of(rollouts, case.reasoner, "adalr", temperature=TEMPERATURE, **ids)
    return dataclasses.replace(
        policy, reasoner=policy.reasoner.never_saying(t.impossible_ids)
    )


class _Oracle:
    """The losses in torch; question, steps and answer are tokenised here, by themselves."""

    def __init__(self, case):
        self.torch = pytest.importorskip("torch")
        self.case, self.tokenizer = case, case.template.tokenizer
        self.hf = (load_hf_llama if case.digits else load_hf)(
            case.params["reasoner"], case.reasoner.config
        )
        self.filter = load_projector(case.params["reasoner"])

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _hidden(self, inputs_LD):
        """All levels of one row [M, L, D]."""
        return self.torch.stack(
            self.hf(
                inputs_embeds=inputs_LD[None], output_hidden_states=True
            ).hidden_states
        )[:, 0]

    def _losses(self, hidden_LD, targets: list[int]):
        """The cross-entropy of each of the last tokens, none of which can be a choice or `<END>`."""
        logits = self.hf.lm_head(hidden_LD[-len(targets) :])
        others = self.tokenizer.convert_tokens_to_ids(
            ["<END>", "<|CONTINUE|>", "<|STOP|>"]
        )
        logits[:, others] = -self.torch.inf
        return self.torch.nn.functional.cross_entropy(
            logits, self.torch.tensor(targets), reduction="none"
        )

    def _choices(self, hidden_LD):
        """The cross-entropy of going on at all positions but the last, and of stopping there."""
        both = self.tokenizer.convert_tokens_to_ids(["<|CONTINUE|>", "<|STOP|>"])
        logits = self.hf.lm_head(hidden_LD)[:, both] / TEMPERATURE
        chosen = self.torch.tensor([0] * (len(logits) - 1) + [1])
        return self.torch.nn.functional.cross_entropy(logits, chosen, reduction="none")

    def __call__(self):
        torch, functional = self.torch, self.torch.nn.functional
        embed = self.hf.get_input_embeddings()
        start, end = self.tokenizer.convert_tokens_to_ids(["<START>", "<END>"])
        teacher = []
        student = []
        distances = []
        for row in self.case.batch.draw_ids % len(ROWS):
            question, steps, answer = ROWS[row]
            question = self._ids(question)
            written = [token for step in steps[:-1] for token in self._ids(step)]
            answer = [
                *self._ids(f" The answer is: {answer}"),
                self.tokenizer.eos_token_id,
            ]
            place = len(self._ids(" The answer is:"))
            whole = [*question, *written, *answer]
            levels = self._hidden(embed(torch.tensor(whole[:-1])))
            teacher += [self._losses(levels[-1], [*written, *answer])]
            target = levels[1:, len(question) + len(written) + place].detach()
            inputs = embed(torch.tensor([*question, start]))
            for _ in range(LENGTHS[row]):
                inputs = torch.cat([inputs, self.filter(self._hidden(inputs)[-1, -1:])])
            thought = len(inputs)
            levels = self._hidden(
                torch.cat([inputs, embed(torch.tensor([end, *answer[:-1]]))])
            )
            student += [
                self._choices(levels[-1, len(question) : thought]),
                self._losses(levels[-1], answer),
            ]
            own = levels[1:, thought + 1 + place]
            terms = [
                functional.smooth_l1_loss(o, t) / t.std()
                for o, t in zip(own, target, strict=True)
            ]
            distances += [torch.stack(terms).mean()]
        return (
            torch.cat(student).mean(),
            torch.cat(teacher).mean(),
            torch.stack(distances).mean(),
        )


@pytest.mark.slow
def test_losses_and_gradients_are_torch_s(case):
    loss_fn = case.recipe.loss_of(_policy(case))
    assert sorted(case.batch.student.latents) == sorted(LENGTHS)

    def loss(params):
        total, sums = loss_fn(params, case.batch, jax.random.key(0))
        return total / sums["loss"][1], {
            name: total / count for name, (total, count) in sums.items()
        }

    (_, parts), gradient = compiled(jax.value_and_grad(loss, has_aux=True))(case.params)
    oracle = _Oracle(case)
    student, teacher, distance = oracle()
    assert float(distance.detach()) > 0.05
    for name, value in (
        ("student", student),
        ("teacher", teacher),
        ("distil", distance),
    ):
        assert float(parts[name]) == pytest.approx(float(value.detach()), rel=1e-4), (
            name
        )
    whole = student + 0.7 * teacher + 3.0 * distance
    assert float(parts["loss"]) == pytest.approx(float(whole.detach()), rel=1e-4)
    whole.backward()
    backbone, projector = (
        gradient["reasoner"][name] for name in ("backbone", "projector")
    )
    table = "embed_tokens" if case.digits else "wte"
    pairs = [
        (projector["fc_in"]["kernel"].T, oracle.filter[0].weight),
        (projector["norm"]["scale"], oracle.filter[3].weight),
        (backbone[table], oracle.hf.get_input_embeddings().weight),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs.grad, rtol=2e-3, atol=2e-5)


@pytest.mark.slow
def test_adapters_go_with_the_rows_of_its_tokens(case):
    """At the start adapters change nothing, so that the rows' gradient is the table's; the finished table has them."""
    policy = _policy(case)
    tokens = case.template.trained_ids
    assert len(tokens) == 4
    adapted = with_lora(case.recipe, LoraConfig(rank=2), tokens)
    params = case.params | adapted.init(jax.random.key(1), policy, case.params)

    def loss(recipe, params):
        return recipe.loss_of(policy)(params, case.batch, jax.random.key(0))[0]

    whole = compiled(jax.grad(functools.partial(loss, case.recipe)))(case.params)
    parts = compiled(jax.grad(functools.partial(loss, adapted)))(params)
    table = "embed_tokens" if case.digits else "wte"
    rows_RD = parts["adapter"]["rows"][table]
    assert (np.abs(rows_RD).max(axis=1) > 1e-3).all()
    np.testing.assert_allclose(
        rows_RD,
        whole["reasoner"]["backbone"][table][np.array(tokens)],
        rtol=1e-4,
        atol=1e-6,
    )
    moved = params | {
        "adapter": params["adapter"] | {"rows": {table: np.ones_like(rows_RD)}}
    }
    finished = np.array(adapted.finish(moved)["reasoner"]["backbone"][table])
    assert (finished[list(tokens)] == 1).all()
    others = np.setdiff1d(np.arange(len(finished)), tokens)
    np.testing.assert_array_equal(
        finished[others], case.params["reasoner"]["backbone"][table][others]
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"latent_policy.name": "latent"},
            "config.latent_policy.name: latent, but the recipe adalr trains when",
        ),
        (
            {"max_latents": 5},
            "config.max_latents: 5, but the recipe adalr trains thoughts of up to 6 latents; raise",
        ),
    ],
)
def test_what_can_t_be_learned_is_refused(changes, words):
    config = default_config()
    config.update(reasoner="adalr_gpt2", max_latents=8)
    config.gate.enabled = False
    config.latent_policy.name = "adalr"
    config.update_from_flattened_dict(changes)
    config = read_config(config)
    with pytest.raises(UserError, match=words):
        config.imitate.adalr.check("adalr", config)
