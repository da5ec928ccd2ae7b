"""Trajectories as whole sequences, and SLPO's objective on them, for `benchmarks.witness.step`."""

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.witness.rollout import Trajectories
from slpo_jax.policy.policy import Prompts, RolloutConfig
from slpo_jax.training.objectives.slpo import Slpo


def answer_lengths(tokens_NA: torch.Tensor, eos_id: int) -> torch.Tensor:
    """int64 [N]: generated tokens, eos included."""
    is_eos_NA = tokens_NA == eos_id
    return (is_eos_NA.cumsum(1) - is_eos_NA.long() == 0).sum(1)


@dataclasses.dataclass
class Sequences:
    """Whole sequences [prompt | latents | end marker + answer] of N trajectories, without gaps, padded on the right.

    So every position id is a column, causal attention needs no mask, and the padding is that of the longest row.

    Attributes:
        tokens: int64 [N, L]; latents stand in for it where `thought`.
        latents: float32 [N, L, D], of meaning where `thought`.
        thought, noisy: bool [N, L]; noisy are the prompt and all latents but the last.
        before_h: int64 [N, T'], the column whose hidden state is z_t, T' the longest tau.
        rows, columns, targets: int64 [M], of all answer tokens: trajectory, column whose logits predict it, and itself.
    """

    tokens: torch.Tensor
    latents: torch.Tensor
    thought: torch.Tensor
    noisy: torch.Tensor
    before_h: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor


def make_sequences(
    prompts: Prompts,
    group: int,
    trajectories: Trajectories,
    config: RolloutConfig,
    multiple: int = 1,
) -> Sequences:
    """The sequences of B*G trajectories.

    Args:
        prompts: B left-padded prompts.
        multiple: L is rounded up to a multiple of it.
    """
    device = trajectories.tokens.device
    tokens_NP = torch.tensor(
        np.array(prompts.tokens, np.int64), device=device
    ).repeat_interleave(group, 0)
    valid_NP = torch.tensor(np.array(prompts.valid), device=device).repeat_interleave(
        group, 0
    )
    slots = tokens_NP.shape[1]
    prompt_N1 = valid_NP.sum(1, keepdim=True)
    tau_N1 = trajectories.lengths[:, None]
    answer_N = answer_lengths(trajectories.tokens, config.eos_ids[0])
    longest = int((prompt_N1[:, 0] + trajectories.lengths + answer_N).max())
    column_L = torch.arange(-(-longest // multiple) * multiple, device=device)
    # The prompt's last slot is followed by the end marker and the answer in `source`, by the latents in the sequence.
    source = torch.cat(
        [
            tokens_NP,
            torch.full_like(prompt_N1, config.closing_ids[0]),
            trajectories.tokens,
        ],
        dim=1,
    )
    step_NL = column_L - prompt_N1  # t - 1 of a latent
    slot_NL = slots + torch.where(step_NL < 0, step_NL, step_NL - tau_N1)
    chosen_NL1 = step_NL.clamp(0, config.max_latents - 1)[..., None]
    rows_M, order_M = (
        (torch.arange(trajectories.tokens.shape[1], device=device) < answer_N[:, None])
        .nonzero()
        .T
    )
    return Sequences(
        tokens=source.gather(1, slot_NL.clamp(0, source.shape[1] - 1)),
        latents=trajectories.latents.gather(
            1, chosen_NL1.expand(-1, -1, trajectories.latents.shape[2])
        ),
        thought=(step_NL >= 0) & (step_NL < tau_N1),
        noisy=step_NL < tau_N1 - 1,
        before_h=(prompt_N1 - 1 + torch.arange(int(tau_N1.max()), device=device)).clamp(
            max=len(column_L) - 1
        ),
        rows=rows_M,
        columns=(prompt_N1 + tau_N1)[rows_M, 0] + order_M,
        targets=trajectories.tokens[rows_M, order_M],
    )


def advantages(rewards_BG: torch.Tensor, name: str) -> torch.Tensor:
    """RLOO's or GRPO's advantages [B, G]."""
    group = rewards_BG.shape[1]
    if name == "rloo":
        return rewards_BG - (rewards_BG.sum(1, keepdim=True) - rewards_BG) / (group - 1)
    return (rewards_BG - rewards_BG.mean(1, keepdim=True)) / (
        rewards_BG.std(1, keepdim=True) + 1e-4
    )


def latent_log_likelihood(h_NTD, z_KNTD, lengths_N, config: Slpo) -> torch.Tensor:
    """float32 [N]: the Gaussian's log-likelihoods of h_1 .. h_tau, with the moments of the K passes."""
    width = h_NTD.shape[-1]
    offsets_KNTD = z_KNTD - z_KNTD[0]
    offset_NTD = offsets_KNTD.mean(0)
    variance_NT = (offsets_KNTD - offset_NTD).square().mean((0, 3)) + config.epsilon
    if config.detach_variance:
        variance_NT = variance_NT.detach()
    distance_NT = (h_NTD - z_KNTD[0] - offset_NTD).square().sum(-1)
    log_probs_NT = -0.5 * width * torch.log(2 * math.pi * variance_NT) - distance_NT / (
        2 * variance_NT
    )
    if config.latent_reduction == "mean":
        log_probs_NT = log_probs_NT / width
    seen_NT = torch.arange(h_NTD.shape[1], device=h_NTD.device) < lengths_N[:, None]
    return torch.where(seen_NT, log_probs_NT, 0.0).sum(1)


def stop_log_likelihood(logits_NT, lengths_N, steps: int) -> torch.Tensor:
    """float32 [N]: log P(tau); `steps` is T, at which the stop is certain."""
    last_N1 = lengths_N[:, None] - 1
    before_NT = torch.arange(logits_NT.shape[1], device=logits_NT.device) < last_N1
    survive_N = torch.where(before_NT, F.logsigmoid(-logits_NT), 0.0).sum(1)
    stop_N = F.logsigmoid(logits_NT.gather(1, last_N1)[:, 0])
    return survive_N + torch.where(lengths_N == steps, 0.0, stop_N)
