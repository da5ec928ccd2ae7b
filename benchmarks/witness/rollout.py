"""Rollouts in PyTorch with transformers' GPT-2 and its KV cache, for `benchmarks.witness.step`."""

import dataclasses
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from benchmarks.witness.model import Noise, noise_at
from slpo_jax.policy.policy import Prompts, RolloutConfig


@dataclasses.dataclass
class Trajectories:
    """What N rollouts produced; those of `slpo_jax.policy.rollout.Trajectories`, as torch tensors.

    Attributes:
        latents: float32 [N, T, D], zeros after tau.
        lengths: int64 [N], tau.
        tokens: int64 [N, A], up to and including eos, then pad.
    """

    latents: torch.Tensor
    lengths: torch.Tensor
    tokens: torch.Tensor


@dataclasses.dataclass
class Sampler:
    """Thinks and answers, one batch of rows at a time.

    The cache is a DynamicCache, which is never longer than the rollouts.

    Attributes:
        model: transformers' GPT2LMHeadModel.
        gate: from a latent to the stop logit.
        noise: of the model's dropout sites.
        end_answers_at: the generated token, counted from 0, from which on all are eos, whatever the logits say.
        transformer: what makes hidden states, the model's or a compiled one.
    """

    model: Any
    gate: torch.nn.Module
    noise: Noise
    config: RolloutConfig
    end_answers_at: int | None = None
    transformer: Any = None

    def __post_init__(self):
        self.transformer = self.transformer or self.model.transformer

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.gate.weight.device

    def stop_logits(self, h: torch.Tensor) -> torch.Tensor:
        """The gate's float32 logits [..] of latents [.., D], whatever autocast is on."""
        with torch.autocast(self.device.type, enabled=False):
            return self.gate(h.float())[..., 0]

    def _forward(
        self, inputs_NLD, positions_NL, mask_NLS, cache: DynamicCache
    ) -> torch.Tensor:
        """Hidden states [N, L, D] of the next L positions, which the cache takes in; the mask None is plain causal."""
        out = self.transformer(
            inputs_embeds=inputs_NLD,
            position_ids=positions_NL,
            attention_mask=None if mask_NLS is None else mask_NLS[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state

    def _prefill(self, prompts: Prompts, group: int):
        """h_1 [N, D], cache, valid [N, P] and positions before the next [N], each prompt `group` times."""
        valid_BP = np.asarray(prompts.valid)
        start = int(
            valid_BP.any(axis=0).argmax()
        )  # slots before it are padding in all rows
        valid_NP = torch.as_tensor(
            valid_BP[:, start:].repeat(group, 0), device=self.device
        )
        tokens_NP = torch.as_tensor(
            np.asarray(prompts.tokens)[:, start:].repeat(group, 0), device=self.device
        )
        slots = valid_NP.shape[1]
        cache = DynamicCache()
        mask_NPP = None
        if not valid_BP[:, start:].all():
            causal = torch.ones(
                slots, slots, dtype=torch.bool, device=self.device
            ).tril()
            # Padding sees itself, as the softmax of a row that sees nothing is NaN.
            mask_NPP = (causal & valid_NP[:, None]) | torch.eye(
                slots, dtype=torch.bool, device=self.device
            )
        positions_NP = (valid_NP.cumsum(1) - 1).clamp(min=0)
        with noise_at(self.noise, True):
            hidden_NPD = self._forward(
                self.model.transformer.wte(tokens_NP), positions_NP, mask_NPP, cache
            )
        return hidden_NPD[:, -1], cache, valid_NP, valid_NP.sum(1)

    def _think(self, prompts: Prompts, group: int, lengths_N, rule: float | None):
        """Latents [N, T, D], tau [N], cache, valid slots [N, S] and positions before the end marker [N]."""
        config = self.config
        h_ND, cache, valid_NS, before_N = self._prefill(prompts, group)
        rows = len(h_ND)
        latents_NTD = h_ND.new_zeros(
            rows, config.max_latents, h_ND.shape[1], dtype=torch.float32
        )
        tau_N = torch.zeros(rows, dtype=torch.long, device=self.device)
        active_N = torch.ones(rows, dtype=torch.bool, device=self.device)
        for t in range(1, config.max_latents + 1):
            latents_NTD[:, t - 1] = torch.where(active_N[:, None], h_ND, 0.0)
            rho_N = torch.sigmoid(self.stop_logits(h_ND))
            fires_N = rho_N >= rule if lengths_N is None else t >= lengths_N
            stops_N = active_N & (fires_N | (t == config.max_latents))
            goes_on_N = active_N & ~stops_N
            tau_N = torch.where(stops_N, t, tau_N)
            valid_NS = torch.cat([valid_NS, active_N[:, None]], dim=1)
            going_on = int(goes_on_N.sum())
            some_noisy = goes_on_N[:, None] if 0 < going_on < rows else going_on > 0
            with noise_at(self.noise, some_noisy):
                hidden_N1D = self._forward(
                    h_ND[:, None], (before_N + t - 1)[:, None], valid_NS[:, None], cache
                )
            h_ND = hidden_N1D[:, 0]
            active_N = goes_on_N
            if not going_on:
                break
        return latents_NTD, tau_N, cache, valid_NS, before_N + tau_N

    def _answer(self, cache: DynamicCache, valid_NS, before_N) -> torch.Tensor:
        """Greedy tokens int64 [N, A] after the end marker."""
        config = self.config
        rows = len(before_N)
        tokens_NA = torch.full(
            (rows, config.answer_slots), config.pad_id, device=self.device
        )
        token_N = torch.full((rows,), config.closing_ids[0], device=self.device)
        ended_N = torch.zeros(rows, dtype=torch.bool, device=self.device)
        for slot in range(config.answer_slots):
            valid_NS = torch.cat([valid_NS, ~ended_N[:, None]], dim=1)
            inputs_N1D = self.model.transformer.wte(token_N[:, None])
            hidden_N1D = self._forward(
                inputs_N1D, (before_N + slot)[:, None], valid_NS[:, None], cache
            )
            logits_NV = self.model.lm_head(hidden_N1D[:, 0]).float()
            if config.banned_ids:
                logits_NV[:, list(config.banned_ids)] = -torch.inf
            token_N = logits_NV.argmax(1)
            if self.end_answers_at is not None and slot >= self.end_answers_at:
                token_N = torch.full_like(token_N, config.eos_ids[0])
            token_N = torch.where(ended_N, config.pad_id, token_N)
            tokens_NA[:, slot] = token_N
            ended_N = ended_N | (token_N == config.eos_ids[0])
            if ended_N.all():
                break
        return tokens_NA

    @torch.no_grad()
    def rollout(
        self, prompts: Prompts, group: int, lengths_N=None, rule: float | None = None
    ) -> Trajectories:
        """`group` rollouts of each prompt as one batch, a prompt's in a row.

        Args:
            prompts: left-padded, numpy or jax.
            lengths_N: int, tau of each row (at most T), instead of the gate, which is still evaluated.
            rule: else stop at the first rho_t >= rule.
        """
        if lengths_N is not None:
            lengths_N = torch.as_tensor(np.array(lengths_N), device=self.device)
        latents, lengths, cache, valid_NS, before_N = self._think(
            prompts, group, lengths_N, rule
        )
        return Trajectories(latents, lengths, self._answer(cache, valid_NS, before_N))
