"""`python -m benchmarks.levers [--shapes gpt2|quickstart] [--runs 3] [--only NAME ...] [--json FILE]`.

What each of the step's levers is worth: the same program without and with it, all others as they are, in turns, on the
same trajectories, with scratch memory and the difference of their losses. Prints a Markdown table.
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.candidates import compiled, part_programs, step_key, timed, with_sizes
from benchmarks.report import Parser, check_flags, listed, machine, page, run_command, spread, summary
from benchmarks.slpo_step import BASE
from benchmarks.workload import SHAPES, Shapes, Workload, make_workload, random_prompts
from slpo_jax.models import backbone, dropout, packing
from slpo_jax.models.attention import attend
from slpo_jax.models.reasoner import coconut
from slpo_jax.policy import rollout as rollout_module
from slpo_jax.policy import score as scoring
from slpo_jax.policy.prompted import PromptedBatch
from slpo_jax.policy.rollout import Prompts, repeat_to
from slpo_jax.policy.score import score
from slpo_jax.text.batches import end_to_end
from slpo_jax.training import slpo
from slpo_jax.training.state import shard_rows

DEFINITIONS = """
without, with: median (least-most) seconds of the program at K, G = 4, 8; gain: median without over median with
rollout: sampling and verification; gradient: value and gradient of the loss on the same trajectories
prompts are padded, but in the levers that lay them end to end
temp: scratch memory of the program
difference: relative, of losses or gradients (by norm), whichever is larger; - where the noise differs or is not asked
on: the default; selectable: a config value, off by default; left out: not in the project
""".strip().splitlines()

Parts = slpo.Slpo
SIDES = ("without", "with")


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """No change."""
    yield


@dataclasses.dataclass(frozen=True)
class Lever:
    """One thing that can be switched.

    Attributes:
        about: what it does.
        standing: "on", "selectable" or "left out".
        program: "rollout" or "gradient".
        without, having: the step's parts in the two cases.
        patch_without, patch_having: what is replaced while they are traced.
        same_noise: whether the losses have to be equal.
        end_to_end: prompts of a quarter to three quarters of their slots, with the lever end to end.
    """

    about: str
    standing: str
    program: str
    without: Callable[[Parts], Parts] = lambda parts: parts
    having: Callable[[Parts], Parts] = lambda parts: parts
    patch_without: Callable[[], Any] = nothing
    patch_having: Callable[[], Any] = nothing
    same_noise: bool = True
    end_to_end: bool = False


def with_model(**changes) -> Callable[[Parts], Parts]:
    """Parts whose model has other settings; for gradients, whose answers need no forced end."""
    return lambda parts: dataclasses.replace(
        parts, reasoner=coconut(dataclasses.replace(parts.reasoner.config, **changes))
    )


def with_rooms(*rooms) -> Callable[[Parts], Parts]:
    """Parts with other rooms."""
    return lambda parts: dataclasses.replace(parts, config=dataclasses.replace(parts.config, rooms=rooms))


def clean_prompts(parts: Parts) -> Parts:
    """Parts without noise on the prompts."""
    return dataclasses.replace(parts, rollout_config=dataclasses.replace(parts.rollout_config, dropout_where="latents"))


def whole_prompts(parts: Parts) -> Parts:
    """Parts whose last block works on all positions of a prompt."""

    def forward(*args, last=0, **kwargs):
        hidden_BLD, cache = parts.reasoner.forward(*args, **kwargs)
        return hidden_BLD[:, -last:], cache

    return dataclasses.replace(parts, reasoner=dataclasses.replace(parts.reasoner, forward=forward))


def score_apart(reasoner, params, prompts: Prompts, index_B, trajectories, key, passes, config, _room=None):
    """`score` that encodes a trajectory's prompt for it alone, and has room for all of its slots."""
    rows = trajectories.lengths.shape[0]
    apart = Prompts(repeat_to(prompts.tokens, rows), repeat_to(prompts.valid, rows))
    return score(reasoner, params, apart, jnp.arange(rows), trajectories, key, passes, config)


def rollout_apart(reasoner, gate, params, prompts: Prompts, keys_N, *rest):
    """`rollout` that encodes each rollout's prompt for it alone."""
    rows = keys_N.shape[0]
    apart = Prompts(repeat_to(prompts.tokens, rows), repeat_to(prompts.valid, rows))
    return rollout_module.rollout(reasoner, gate, params, apart, keys_N, *rest)


def threefry_bits(keys_BL, site: int, width: int):
    """`dropout._bits` of jax's own generator."""
    draw = jax.vmap(jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, site), (width,))))
    return draw(keys_BL)


def library_attention(q_BHLD, k_BGSD, v_BGSD, mask_BLS, prefix=None):
    """`attend` by jax.nn.dot_product_attention, for which a shared prefix is copied to each of its rows."""
    rows = q_BHLD.shape[0]
    if prefix is not None:
        k_BGUD, v_BGUD, valid_BU = (repeat_to(x, rows) for x in prefix)
        k_BGSD, v_BGSD = (jnp.concatenate(pair, axis=2) for pair in ((k_BGUD, k_BGSD), (v_BGUD, v_BGSD)))
        before_BLU = jnp.broadcast_to(valid_BU[:, None], (rows, q_BHLD.shape[2], valid_BU.shape[1]))
        mask_BLS = jnp.concatenate([before_BLU, mask_BLS], axis=2)
    turned = (x.swapaxes(1, 2) for x in (q_BHLD, k_BGSD, v_BGSD))
    return jax.nn.dot_product_attention(*turned, mask=mask_BLS[:, None]).swapaxes(1, 2)


def chunked_log_probs(_reasoner, params, hidden_BLD, tokens_BL, chunks=8):
    """`score.answer_log_probs` of a tied GPT-2, a part of the vocabulary at a time, made again for its gradient."""
    head_VD = params["backbone"]["wte"]

    @jax.checkpoint
    def part(hidden_BLD, head_VD, first):
        logits_BLV = jnp.einsum("bld,vd->blv", hidden_BLD, head_VD, preferred_element_type=jnp.float32)
        here_BL = tokens_BL - first
        chosen_BL = jnp.take_along_axis(logits_BLV, jnp.clip(here_BL, 0, len(head_VD) - 1)[..., None], axis=-1)[..., 0]
        inside_BL = (here_BL >= 0) & (here_BL < len(head_VD))
        return jax.nn.logsumexp(logits_BLV, axis=-1), jnp.where(inside_BL, chosen_BL, 0)

    starts = np.linspace(0, len(head_VD), chunks + 1).astype(int)
    sums, chosen = zip(*(part(hidden_BLD, head_VD[a:b], a) for a, b in itertools.pairwise(starts)), strict=True)
    return sum(chosen) - jax.nn.logsumexp(jnp.stack(sums), axis=0)


def move_by_autodiff(x_BI, from_BO, *_):
    """`packing._move` with whatever gradient autodiff finds: a scatter."""
    return packing._rows_take(x_BI, from_BO)


def patched(where, name: str, value) -> Callable[[], Any]:
    """A maker of patches."""
    return lambda: mock.patch.object(where, name, value)


LEVERS = {
    "rooms": Lever("unused slots are not scored", "on", "gradient", without=with_rooms((1.0, 1.0))),
    "shared_prompts": Lever(
        "a prompt's encoding is shared by its trajectories in scoring (and with it their rooms)", "on", "gradient",
        without=with_rooms((1.0, 1.0)), patch_without=patched(slpo, "score", score_apart), same_noise=False,
    ),
    "end_to_end": Lever("prompts that fill a half of their slots lie end to end", "on", "gradient", end_to_end=True),
    "end_to_end_rollout": Lever("the same in rollouts", "on", "rollout", end_to_end=True),
    "gather_gradient": Lever("the gradient of packing is a gather, not a scatter", "on", "gradient",
                             patch_without=patched(packing, "_move", move_by_autodiff)),
    "last_position": Lever("the last block makes only a prompt's last position", "on", "rollout", whole_prompts),
    "last_position_scored": Lever("the same in scoring", "on", "gradient", whole_prompts),
    "dropout": Lever("a counter-based hash makes dropout's bits, not threefry", "on", "gradient",
                     patch_without=patched(dropout, "_bits", threefry_bits), same_noise=False),
    "shared_prefill": Lever("rollouts share a prompt without noise (dropout.where=latents)", "on", "rollout",
                            clean_prompts, clean_prompts, patched(slpo, "rollout", rollout_apart)),
    "remat": Lever("blocks are computed again in the backward pass", "selectable", "gradient",
                   having=with_model(remat=True)),
    "scan_layers": Lever("layers as a loop over one block", "selectable", "gradient",
                         having=with_model(scan_layers=True)),
    "scan_layers_remat": Lever("layers as a loop, and blocks computed again", "selectable", "gradient",
                               having=with_model(scan_layers=True, remat=True)),
    "bfloat16": Lever("activations in bfloat16", "selectable", "gradient", having=with_model(dtype=jnp.bfloat16)),
    "vocabulary_chunks": Lever("answers' logits in eight parts of the vocabulary", "left out", "gradient",
                               patch_having=patched(scoring, "answer_log_probs", chunked_log_probs)),
    "library_attention": Lever("jax.nn.dot_product_attention", "left out", "gradient",
                               patch_having=patched(backbone, "attend", library_attention)),
    "library_attention_rollout": Lever("the same in rollouts", "left out", "rollout",
                                       patch_having=patched(backbone, "attend", library_attention)),
}  # fmt: skip
assert backbone.attend is attend  # what is patched above is what the backbones call


def half_empty(work: Workload, batch: PromptedBatch, together: bool) -> PromptedBatch:
    """The batch with prompts of a quarter to three quarters of their slots, as they are or end to end."""
    rows, slots = batch.prompts.tokens.shape
    prompts = random_prompts(rows, slots, (slots // 4, 3 * slots // 4), work.parts.rollout_config.end_id, 0)
    most = int(prompts.lengths.reshape(work.mesh.size, -1).sum(axis=1).max())
    places = end_to_end(most, rows // work.mesh.size, slots) if together else 0
    return shard_rows(batch.replace(prompts=prompts.replace(places=places)), work.mesh)


def measure(work: Workload, lever: Lever, runs: int) -> dict[str, Any]:
    """The lever's row."""
    parts, params = with_sizes(work.parts, *BASE), work.state.params
    batch, key = work.batch(0), step_key(work, 0)
    batch = batch.replace(prompts=batch.prompts.replace(places=0))
    batches = {name: half_empty(work, batch, name == "with") if lever.end_to_end else batch for name in SIDES}
    rest = (key,)
    if lever.program == "gradient":
        rest = (*part_programs(parts, work.mesh)[0](params, batches["without"], key), key)
    args = {name: (params, batches[name], *rest) for name in SIDES}
    which = ("rollout", "surrogate", "gradient").index(lever.program)
    programs, compiling, out = {}, {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    changes = ((lever.without, lever.patch_without), (lever.having, lever.patch_having))
    for name, (change, patch) in zip(SIDES, changes, strict=True):
        with patch():
            programs[name], compiling[name] = compiled(part_programs(change(parts), work.mesh)[which], *args[name])
    for _ in range(1 + runs):
        for name, program in programs.items():
            spent: dict[str, float] = {}
            out[name] = timed(spent, name, program, *args[name])
            seconds[name].append(spent[name])
    cells = {name: summary(values[1:]) for name, values in seconds.items()}
    return {
        "about": lever.about, "standing": lever.standing, "program": lever.program, **cells,
        "gain": statistics.median(cells["without"]["values"]) / statistics.median(cells["with"]["values"]),
        "compile_seconds": compiling,
        "temp_bytes": {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()},
        "difference": difference(*out.values()) if lever.program == "gradient" and lever.same_noise else None,
        "tokens_equal": lever.program == "gradient" or bool(np.all(out["with"][0].tokens == out["without"][0].tokens)),
    }  # fmt: skip


def difference(one, other) -> float:
    """The larger relative difference of two (loss, gradient)."""
    losses = abs(float(other[0]) / float(one[0]) - 1)
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, one[1], other[1])) / optax.tree.norm(one[1])
    return max(losses, float(apart))


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    head = ["Lever", "Stands", "Program", "Without (s)", "With (s)", "Gain", "Compile without (s)", "Compile with (s)",
            "Temp without (MB)", "Temp with (MB)", "Difference"]  # fmt: skip
    lines = []
    for row in result["rows"].values():
        temp = [f"{row['temp_bytes'][name] / 1e6:.0f}" for name in SIDES]
        same = "-" if row["difference"] is None else f"{row['difference']:.0e}"
        if row["program"] == "rollout":
            same = "same tokens" if row["tokens_equal"] else "tokens differ"
        compiling = [f"{row['compile_seconds'][name]:.1f}" for name in SIDES]
        cells = [spread(row["without"]), spread(row["with"]), f"{row['gain']:.2f}x", *compiling, *temp, same]
        lines.append([row["about"], row["standing"], row["program"], *cells])
    facts = (
        f"machine: {listed(result['machine'])}",
        f"work: {listed(result['work'])}; {result['runs']} runs after one",
    )
    return page(f"Levers of the SLPO step, {result['shapes']} shapes", facts, DEFINITIONS, head, lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("levers", "What each lever is worth.", SHAPES)
    parser.add_argument("--prompts", type=int, help="prompts a step; default: 32 (quickstart), 2 (gpt2)")
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each program; default: 3")
    parser.add_argument("--only", nargs="+", choices=sorted(LEVERS), default=list(LEVERS), help="default: all")
    flags = parser.parse_args(argv)
    check_flags(flags, prompts=1, runs=1)
    return flags


def benchmark(shapes: Shapes, config, flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    levers = {name: LEVERS[name] for name in flags.only}
    with tempfile.TemporaryDirectory() as workdir:
        work = make_workload(shapes, config, flags.prompts or shapes.prompts, Path(workdir))
        rows = {name: measure(work, lever, flags.runs) for name, lever in levers.items()}
    return {"shapes": flags.shapes, "runs": flags.runs, "machine": machine(), "work": work.facts, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, SHAPES, benchmark, markdown)


if __name__ == "__main__":
    main()
