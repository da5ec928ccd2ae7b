"""CODI's distillation against the same losses written in torch, one unpadded row at a time, on transformers' models."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_llama
from codi_run import PHASE, PROBLEMS, RECIPE, ROWS, new_tokenizer
from plain_gpt2 import dropout_factors, plain_hidden
from slpo_jax.architectures.codi import Codi
from slpo_jax.data.batches import encode_problems
from slpo_jax.policy import noise
from slpo_jax.policy.policy import RolloutConfig
from slpo_jax.training.recipes import Phase
from slpo_jax.training.recipes.distil import distillation
from tiny import compiled, load_hf, load_projector, policy_of, random_tree
from tiny_llama import load_hf_llama

HIDDEN = 9


def _rollout(t, latents: int, rate: float = 0.0) -> RolloutConfig:
    return RolloutConfig(
        latents, 8, t.closing_ids, t.eos_ids, t.pad_id, dropout_rate=rate
    )


@pytest.fixture(
    scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)]
)
def case(request, tmp_path_factory):
    """A model, problems in tokens of either kind, and one batch of all of them."""
    tokenizer = new_tokenizer(tmp_path_factory, digits=request.param == "llama")
    template = Codi(1).template(tokenizer)
    base = {"gpt2": tiny.CONFIG, "llama": tiny_llama.LLAMA}[request.param]
    config = dataclasses.replace(
        base, vocab_size=len(tokenizer), n_layer=1 if request.param == "gpt2" else 2
    )
    reasoner = Codi(HIDDEN).on(config)
    params = {"reasoner": random_tree(reasoner), "gate": tiny.random_gate()}
    problems = encode_problems(template, PROBLEMS)
    batch = RECIPE.batch(problems, PHASE, 0, 1, 4, (24,), RECIPE.slots(problems, PHASE))
    assert len(set(batch.student.latents)) > 1
    digits = request.param == "llama"
    return SimpleNamespace(
        reasoner=reasoner,
        params=params,
        problems=problems,
        batch=batch,
        digits=digits,
        template=template,
    )


class _Oracle:
    """The losses in torch; question, steps and answer are tokenised here, by themselves."""

    def __init__(self, case):
        self.torch = pytest.importorskip("torch")
        self.case, self.tokenizer = case, case.template.tokenizer
        self.hf = (load_hf_llama if case.digits else load_hf)(
            case.params["reasoner"], case.reasoner.config
        )
        self.projector = load_projector(case.params["reasoner"])
        self.latents = []  # of the last call, [latents, D] of each row

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
        """The cross-entropy of each of the last tokens, which come after the last positions."""
        logits = self.hf.lm_head(hidden_LD[-len(targets) :])
        return self.torch.nn.functional.cross_entropy(
            logits, self.torch.tensor(targets), reduction="none"
        )

    def __call__(self):
        torch, functional = self.torch, self.torch.nn.functional
        embed = self.hf.get_input_embeddings()
        bot, eot = self.tokenizer.convert_tokens_to_ids(
            ["<|start-latent|>", "<|end-latent|>"]
        )
        teacher = []
        student = []
        distances = []
        for row, latents in zip(
            self.case.batch.draw_ids, self.case.batch.student.latents, strict=True
        ):
            question, steps, answer = ROWS[row]
            question = self._ids(question.strip().replace("  ", " "))
            written = self._ids(" ".join(steps[:-1]))
            answer = [
                *self._ids(f"The answer is: {answer}"),
                self.tokenizer.eos_token_id,
            ]
            place = (
                len(self._ids("The answer is:")) - 1 + (1 if self.case.digits else 0)
            )
            whole = [*question, *written, *answer]
            levels = self._hidden(embed(torch.tensor(whole[:-1])))
            teacher += [self._losses(levels[-1], [*written, *answer])]
            target = levels[:, len(question) + len(written) + place].detach()
            inputs = embed(torch.tensor([*question, bot]))
            for _ in range(latents):
                inputs = torch.cat(
                    [inputs, self.projector(self._hidden(inputs)[-1, -1:])]
                )
            thought = len(inputs)
            self.latents.append(inputs[thought - latents :].detach().numpy())
            levels = self._hidden(
                torch.cat([inputs, embed(torch.tensor([eot, *answer[:-1]]))])
            )
            student += [self._losses(levels[-1], answer)]
            own = levels[:, thought + 1 + place]
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
@pytest.mark.parametrize("case", ["gpt2"], indirect=True)
def test_a_taught_stop_counts_as_a_token_of_an_answer(case):
    """The gate's likelihood on torch's latents, divided by the answers' tokens."""
    taught = dataclasses.replace(
        RECIPE, loss=functools.partial(RECIPE.loss.func, gate_weight=0.5)
    )
    policy = policy_of(_rollout(case.template, 3), case.reasoner)
    (plain, sums), (total, others) = (
        compiled(recipe.loss_of(policy))(case.params, case.batch, jax.random.key(0))
        for recipe in (RECIPE, taught)
    )
    oracle = _Oracle(case)
    oracle()
    tokens = int((case.batch.student.suffix.weights > 0).sum())
    out = case.params["gate"]["out"]
    kernel = np.float64(out["kernel"][:, 0])
    bias = float(out["bias"][0])
    expected = 0.0
    for latents in oracle.latents:
        rho = 1 / (1 + np.exp(-(latents @ kernel + bias)))
        expected += np.log(rho[-1]) + np.log(1 - rho[:-1]).sum()
    rows = float(sums["loss"][1])
    assert float(total - plain) / rows == pytest.approx(
        -0.5 * expected / tokens, rel=1e-3
    )
    found, count = map(float, others["stop_log_likelihood"])
    assert found / count == pytest.approx(expected / 4, rel=1e-4)


@pytest.mark.slow
def test_losses_and_gradients_are_torch_s(case):
    loss_fn = RECIPE.loss_of(policy_of(_rollout(case.template, 3), case.reasoner))

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
    loss = student + 0.7 * teacher + 3.0 * distance
    assert float(parts["loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    loss.backward()
    backbone, projector = (
        gradient["reasoner"][name] for name in ("backbone", "projector")
    )
    model = oracle.hf.base_model
    theirs = oracle.projector
    pairs = [
        (projector["fc_in"]["kernel"].T, theirs[0]),
        (projector["norm"]["scale"], theirs[3]),
    ]
    if case.digits:
        value = backbone["layers_0"]["self_attn"]["v_proj"]["kernel"].T
        pairs += [
            (backbone["embed_tokens"], model.embed_tokens),
            (value, model.layers[0].self_attn.v_proj),
        ]
    else:
        pairs += [
            (backbone["wte"], model.wte),
            (backbone["h_0"]["attn"]["c_attn"]["kernel"], model.h[0].attn.c_attn),
        ]
    for fast, module in pairs:
        slow = module.weight.grad.numpy()
        assert np.abs(slow).max() > 1e-3
        np.testing.assert_allclose(
            fast, slow, rtol=0, atol=2e-4 * np.abs(slow).max(), err_msg=str(module)
        )


def test_distillation_by_hand():
    """Both branches of smooth L1, levels of different spread, and no gradient to the teacher."""
    rng = np.random.default_rng(0)
    teacher = (rng.normal(size=(3, 2, 5)) * [[[0.3], [4.0]]]).astype(np.float32)
    student = teacher + rng.normal(size=teacher.shape).astype(np.float32) * 1.5
    apart = student - teacher
    spread = np.std(teacher, axis=-1, ddof=1, keepdims=True)
    smooth = np.where(np.abs(apart) < 1, apart**2 / 2, np.abs(apart) - 0.5)
    assert 5 < (np.abs(apart) < 1).sum() < 25
    np.testing.assert_allclose(
        distillation(student, teacher), (smooth / spread).mean(axis=(1, 2)), rtol=1e-5
    )
    own, none = jax.grad(lambda s, t: distillation(s, t).sum(), argnums=(0, 1))(
        jnp.array(student), jnp.array(teacher)
    )
    np.testing.assert_allclose(
        own, np.clip(apart, -1, 1) / spread / 10, rtol=1e-4, atol=1e-6
    )
    assert (none == 0).all()
    low = distillation(student.astype(jnp.bfloat16), teacher.astype(jnp.bfloat16))
    assert low.dtype == jnp.float32


@pytest.mark.slow
def test_the_teacher_alone_under_dropout(case):
    """The first phase: no latents, and noise on every position of the text, which isn't the student's noise."""
    if case.digits:
        pytest.skip("the oracle is a GPT-2")
    phase = Phase("cot", 0, 9, 0, 0, 0)
    batch = RECIPE.batch(
        case.problems, phase, 0, 1, 4, (24,), RECIPE.slots(case.problems, phase)
    )
    assert batch.student is None
    assert jax.tree.all(jax.tree.map(np.array_equal, batch.text, case.batch.text))
    key = jax.random.key(3)
    layout = _rollout(case.template, 0, 0.3)
    config = case.reasoner.config

    def both(params):
        total, sums = RECIPE.loss_of(policy_of(layout, case.reasoner))(
            params, batch, key
        )
        slow = []
        for row, index in enumerate(batch.draw_ids):
            used = int(batch.valid[row].sum())
            row_key = jax.random.fold_in(jax.random.fold_in(key, index), 1)
            masks = noise.answer_dropout(row_key[None], jnp.arange(used), 0.3, "all")
            inputs = params["reasoner"]["backbone"]["wte"][
                batch.text.tokens[row, :used]
            ]
            hidden = plain_hidden(
                params["reasoner"],
                inputs,
                dropout_factors(masks, config.n_embd, config.n_layer),
            )
            log_probs = jax.nn.log_softmax(
                hidden @ params["reasoner"]["backbone"]["wte"].T
            )
            kept = np.flatnonzero(batch.text.weights[row])
            slow += [-log_probs[at, batch.text.targets[row, at]] for at in kept]
        return total / sums["loss"][1], sum(slow) / len(slow)

    ours, slow = compiled(both)(case.params)
    assert float(ours) == pytest.approx(float(slow), rel=1e-4)
