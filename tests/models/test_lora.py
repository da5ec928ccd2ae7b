"""LoRA merged into Dense kernels against peft's adapters on transformers' models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file as load_tensors

import tiny
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.codi import Codi
from slpo_jax.checkpoints.adapters import write_adapters
from slpo_jax.errors import UserError
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, REASONER
from tiny import assert_close, compiled, load_hf, random_tree
from tiny_llama import LLAMA, QWEN3, load_hf_llama

RANK = 3
ALPHA = 5.0
MODELS = {
    "gpt2": (tiny.CONFIG, load_hf, "transformer."),
    "llama": (LLAMA, load_hf_llama, "model."),
    "qwen3": (QWEN3, load_hf_llama, "model."),
}
TOKENS = np.random.default_rng(5).integers(
    0,
    58,
    size=(2, 7),
)


def _flat(tree):
    """Leaves by dotted path."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in paths
    }


def _drawn(adapters, seed):
    """Adapters that do something."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), adapters
    )


def _peft_name(path: str) -> str:
    """h_0.attn.c_attn -> h.0.attn.c_attn."""
    return (
        path.replace("h_", "h.", 1)
        if path.startswith("h_")
        else path.replace("layers_", "layers.", 1)
    )


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """Our reasoner, its parameters, adapters that do something, and peft's model with all of that."""
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    config, load, prefix = MODELS[request.param]
    reasoner = Coconut().on(config)
    params = random_tree(reasoner)
    adapters = _drawn(
        lora.init(jax.random.key(1), params["backbone"], RANK),
        2,
    )
    transposed = request.param == "gpt2"
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", fan_in_fan_out=transposed
    )
    model = peft.get_peft_model(load(params, config), settings).eval()
    theirs = {
        name.removeprefix("base_model.model." + prefix).replace(
            ".default.weight", ""
        ): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    ours = _flat(adapters)
    assert {
        _peft_name(path.replace(".A", ".lora_A").replace(".B", ".lora_B"))
        for path in ours
    } == set(theirs)
    with torch.no_grad():
        for path, leaf in ours.items():
            theirs[_peft_name(path[:-1] + "lora_" + path[-1])].copy_(
                torch.tensor(np.asarray(leaf).T.copy())
            )
    return reasoner, params, adapters, model, theirs


def test_merged_is_peft_s_forward_and_gradient(case):
    torch = pytest.importorskip("torch")
    reasoner, params, adapters, model, theirs = case
    weights = (
        np.random.default_rng(3).normal(size=(*TOKENS.shape, 61)).astype(np.float32)
    )

    def loss(adapters):
        merged = params | {
            "backbone": lora.merge(params["backbone"], adapters, ALPHA / RANK)
        }
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        hidden, _ = reasoner.forward(
            merged, reasoner.embed(merged, TOKENS), positions, positions >= 0
        )
        logits = reasoner.logits(merged, hidden)
        return (logits * weights).mean(), logits

    (_, logits), gradient = compiled(jax.value_and_grad(loss, has_aux=True))(adapters)
    expected = model(input_ids=torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(
        logits,
        expected.detach().numpy(),
        rtol=0,
        atol=1e-4,
    )
    (expected * torch.tensor(weights)).mean().backward()
    for path, leaf in _flat(gradient).items():
        slow = theirs[_peft_name(path[:-1] + "lora_" + path[-1])].grad.numpy().T
        assert np.abs(slow).max() > 1e-4
        np.testing.assert_allclose(
            leaf,
            slow,
            rtol=1e-4,
            atol=1e-5,
            err_msg=path,
        )


def test_what_is_written_opens_in_peft_with_the_same_logits(case, tmp_path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    reasoner, params, adapters, model, _ = case
    write_adapters(tmp_path, adapters, reasoner.config, ALPHA, "some/base")
    load = load_hf if isinstance(reasoner.config, type(tiny.CONFIG)) else load_hf_llama
    opened = peft.PeftModel.from_pretrained(
        load(params, reasoner.config), tmp_path
    ).eval()
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        np.testing.assert_array_equal(
            opened(input_ids=tokens).logits, model(input_ids=tokens).logits
        )
    assert opened.peft_config["default"].base_model_name_or_path == "some/base"
    some = {name: tree for name, tree in adapters.items() if name.endswith("_0")}
    write_adapters(tmp_path, some, reasoner.config, ALPHA, "")
    assert len(load_tensors(tmp_path / "adapter_model.safetensors")) == len(
        jax.tree.leaves(some)
    )


@pytest.mark.parametrize("name", MODELS)
def test_fresh_adapters_are_uniform_and_zero(name):
    params = random_tree(Coconut().on(MODELS[name][0]))
    ours = _flat(
        lora.init(
            jax.random.key(7),
            params["backbone"],
            400,
        )
    )
    seen = []
    for path, leaf in ours.items():
        if path.endswith("B"):
            assert (leaf == 0).all()
            continue
        bound = leaf.shape[0] ** -0.5  # kaiming_uniform_(a=sqrt(5)) of torch's [r, in]
        assert 0.98 * bound < np.abs(leaf).max() <= bound
        assert np.std(leaf) == pytest.approx(bound / 3**0.5, rel=0.05)
        seen.append(float(leaf[0, 0]) / bound)
    assert len(np.unique(seen)) == len(seen) == len(ours) / 2


def test_adapter_of_a_reasoner_has_its_projector_whole():
    reasoner = Codi(9).on(LLAMA)
    params = random_tree(reasoner)
    tree = {REASONER: params, "latent_policy": {"decay": 0}}
    adapter = lora.adapter(jax.random.key(0), tree, 2)
    assert set(adapter) == {"lora", "projector"}
    assert set(_flat(adapter["lora"])) == {
        path.replace("kernel", name)
        for path in _flat(params["backbone"])
        if path.endswith("kernel")
        for name in "AB"
    }
    # A training step gives the state's arrays away: none may be there twice.
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert not pointers & {
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(adapter)
    }
    changed = jax.tree.map(lambda x: x + 1.0, adapter)
    left = lora.without_adapter({**tree, ADAPTER: changed}, 0.5)
    merged = left[REASONER]
    assert left.keys() == {REASONER, "latent_policy"}, "the other parts stay"
    np.testing.assert_array_equal(
        merged["projector"]["fc_in"]["bias"], params["projector"]["fc_in"]["bias"] + 1
    )
    np.testing.assert_array_equal(
        merged["backbone"]["embed_tokens"], params["backbone"]["embed_tokens"]
    )
    kernel, pair = (
        tree["layers_1"]["mlp"]["up_proj"]
        for tree in (params["backbone"], changed["lora"])
    )
    expected = np.asarray(kernel["kernel"]) + 0.5 * np.asarray(pair["A"]) @ np.asarray(
        pair["B"]
    )
    np.testing.assert_allclose(
        merged["backbone"]["layers_1"]["mlp"]["up_proj"]["kernel"], expected, rtol=1e-5
    )


def test_adapters_of_the_kernels_that_are_named(case):
    """As those of all kernels begin; the others have none."""
    _, params, *_ = case
    names = ("q_proj", "c_attn", "v_proj")
    tree = {REASONER: params}
    names = tuple(
        name for name in names if f"'{name}'" in str(jax.tree.structure(params))
    )
    every, some = (
        _flat(lora.adapter(jax.random.key(7), tree, RANK, each)["lora"])
        for each in ((), names)
    )
    assert some.keys() == {path for path in every if path.split(".")[-2] in names}
    assert all(np.array_equal(leaf, every[path]) for path, leaf in some.items())
    for other in (
        "q_prog",
        "attn",
        "self_attn",
        "kernel",
    ):  # of these the last three are parts of some, and no kernels
        said = rf"^config\.rl\.lora\.kernels: '{other}' is not .*it has (c_attn|down_proj), "
        with pytest.raises(UserError, match=said):
            lora.adapter(
                jax.random.key(7),
                tree,
                RANK,
                (other,),
                "config.rl.lora",
            )
    width = min(
        params["backbone"][
            "wte" if "wte" in params["backbone"] else "embed_tokens"
        ].shape
    )
    with pytest.raises(
        UserError, match=rf"^config\.imitate\.lora\.rank: {width + 1} .*{width}"
    ):
        jax.eval_shape(lambda: lora.adapter(jax.random.key(7), tree, width + 1))


@pytest.mark.slow
@pytest.mark.parametrize("loop", [False, True])
def test_programs_read_fresh_adapters_as_if_there_were_none(loop):
    """To the bit, layers one by one or as a loop; a second time, and without adapters, there is nothing to merge.

    Layers in a loop have them apart, each merged as it comes, and all at once where no gradient is taken.
    """
    plain = Coconut().on(dataclasses.replace(LLAMA, scan_layers=loop)).in_tree()
    params = {
        REASONER: random_tree(Coconut().on(LLAMA)),
        "gate": {"bias": jnp.ones(1)},
    }
    own = {ADAPTER: lora.adapter(jax.random.key(3), params, RANK)}
    reads = lora.make_merging(plain, ALPHA / RANK).stack
    wanted = plain.stack(params)
    once = reads(params | own)
    pairs = [x.shape for x in jax.tree.leaves(once) if x.ndim == 3 and RANK in x.shape]
    assert len(pairs) == (14 if loop else 0), "A and B of seven kernels"
    for found in map(plain.cast, (once, reads(once), reads(params))):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: (a == b).all(),
                found,
                wanted,
            )
        )
    moved = plain.cast(reads(params | jax.tree.map(lambda x: x + 1.0, own)))
    assert not jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), moved, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_over_layers_merges_one_after_the_other(remat):
    """Outputs and gradients are those of layers one by one with merged kernels; no cotangent is of all kernels."""
    params = {REASONER: random_tree(Coconut().on(LLAMA))}
    rng = np.random.default_rng(6)
    own = _drawn(
        lora.adapter(jax.random.key(3), params, RANK),
        7,
    )
    inputs_BLD = jnp.asarray(
        rng.normal(size=(2, 5, LLAMA.n_embd)),
        jnp.float32,
    )
    positions_BL = jnp.broadcast_to(jnp.arange(5), (2, 5))

    def gradient(loop):
        config = dataclasses.replace(LLAMA, scan_layers=loop, remat=loop and remat)
        reasoner = lora.make_merging(
            Coconut().on(config).in_tree(),
            ALPHA / RANK,
        )

        def loss(own):
            found = reasoner.stack(params | {ADAPTER: own})
            return jnp.square(
                reasoner.forward(found, inputs_BLD, positions_BL, positions_BL >= 0)[0]
            ).sum()

        return jax.value_and_grad(loss)

    assert_close(
        *(jax.jit(gradient(loop))(own) for loop in (True, False)), rtol=2e-4, atol=2e-4
    )
    loops = [
        each
        for each in jax.make_jaxpr(gradient(True))(own).eqns
        if each.primitive.name == "scan"
    ]
    assert len(loops) == 2
    made = {out.aval.shape for each in loops for out in each.outvars}
    layer = params[REASONER]["backbone"]["layers_0"]
    kernels = {
        (LLAMA.n_layer, *x["kernel"].shape)
        for part in ("self_attn", "mlp")
        for x in layer[part].values()
    }
    assert not made & kernels
    assert made >= {(LLAMA.n_layer, RANK, columns) for *_, columns in kernels}
