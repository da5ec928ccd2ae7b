"""SLPO's step in PyTorch and transformers, as one would write it there: what the benchmarks compare slpo_jax with.

The K scoring passes are one batch of K*B*G whole sequences, each trimmed to what the longest needs, with causal SDPA
attention and no mask; nothing is shared between the sequences of a prompt. COCONUT on GPT-2 with a linear gate only.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.optimization import Adafactor

from benchmarks.witness.model import Noise, check_compiler, make_models, noise_at
from benchmarks.witness.objective import (
    advantages,
    latent_log_likelihood,
    make_sequences,
    stop_log_likelihood,
)
from benchmarks.witness.rollout import Sampler, Trajectories
from slpo_jax.policy.policy import Policy, Prompts
from slpo_jax.training.objectives.slpo import Slpo
from slpo_jax.training.optimizer import OptimizerConfig

Verify = Callable[[np.ndarray, Any], np.ndarray]
"""(tokens int [N, A], references) -> float rewards [N]."""

_COMPILED_MULTIPLE = 16  # compiled passes pad their sequences to a multiple of it, so that few lengths are compiled


def make_optimizer(parameters, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The trainer's Adafactor, or AdamW in one kernel; at the constant rate, without warm-up or weight decay."""
    if config.name == "adafactor":
        return Adafactor(
            parameters,
            lr=config.learning_rate,
            clip_threshold=1.0,
            decay_rate=-0.8,
            beta1=None,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
        )
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=0.0, fused=True
    )


class Witness:
    """Models, optimizer and step.

    Noise comes from torch's global generator: `torch.manual_seed` repeats a run.

    Attributes:
        model, gate: transformers' GPT2LMHeadModel and torch's Linear.
        parameters: of both.
        sampled: the last step's `Trajectories`.
    """

    def __init__(
        self,
        params: Any,
        policy: Policy,
        objective: Slpo,
        group: int,
        optimizer: OptimizerConfig,
        compiled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        end_answers_at: int | None = None,
    ):
        """Copies the weights.

        Args:
            params: all parts, numpy or jax arrays.
            policy: of COCONUT on a GPT-2, whose thought has no noise but dropout's.
            group: G.
            optimizer: name, learning rate and clip norm; the schedule and the weight decay are left out.
            compiled: torch.compile the forward pass of the scoring passes.
            dtype: of activations (torch.autocast); parameters, logits and the objective are float32.
            end_answers_at: the generated token, counted from 0, from which on all are eos, whatever the logits say.
        Raises:
            ValueError: a setting that this implementation lacks.
            CompileError: `compiled`, and torch.compile doesn't work on this machine.
        """
        rollout_config = policy.config
        if (
            rollout_config.temperature
            or rollout_config.dropout_where != "thought"
            or rollout_config.max_latents < 1
        ):
            raise ValueError(
                'the torch reference has greedy answers and dropout_where="thought" only'
            )
        if objective.advantage not in ("rloo", "grpo"):
            raise ValueError("the torch reference has rloo and grpo only")
        if policy.latent_policy.log_prob is not None:
            raise ValueError(
                "the torch reference has latents without noise of their own only"
            )
        self.rollout_config = rollout_config
        self.objective = objective
        self.group = group
        self.device = torch.device(device)
        self.dtype = dtype
        self.noise = Noise(rollout_config.dropout_rate)
        self.model, self.gate = make_models(
            params, policy.reasoner.config, self.noise, device
        )
        self.sampler = Sampler(
            self.model, self.gate, self.noise, rollout_config, end_answers_at
        )
        self.parameters = [*self.model.parameters(), *self.gate.parameters()]
        self.optimizer = make_optimizer(self.parameters, optimizer)
        self.clip_norm = optimizer.clip_norm
        self.sampled: Trajectories | None = None
        self._multiple = 1
        self._encode = self._encode_eagerly
        if compiled:
            check_compiler(device)
            self._multiple = _COMPILED_MULTIPLE
            self._encode = torch.compile(self._encode_eagerly, dynamic=False)

    def compile_rollouts(self) -> None:
        """torch.compile the forward pass of rollouts, and so of `passk`.

        Raises:
            CompileError: torch.compile doesn't work on this machine.
        """
        check_compiler(self.device.type)
        self.sampler.transformer = torch.compile(self.model.transformer, dynamic=True)

    def _autocast(self):
        return torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype != torch.float32
        )

    def rollout(
        self, prompts: Prompts, group: int, lengths_N=None, rule: float | None = None
    ) -> Trajectories:
        """`group` rollouts of each prompt as one batch, a prompt's in a row; see `Sampler.rollout`."""
        with self._autocast():
            return self.sampler.rollout(prompts, group, lengths_N, rule)

    def _encode_eagerly(self, inputs_NLD: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, L, D] of whole sequences."""
        return self.model.transformer(inputs_embeds=inputs_NLD).last_hidden_state

    def _score(self, prompts: Prompts, trajectories: Trajectories):
        """z of the K passes, float32 [K, N, T', D], and the answers' log-likelihoods, float32 [N], mean over K."""
        passes = self.objective.passes
        rows = len(trajectories.lengths)
        sequences = make_sequences(
            prompts, self.group, trajectories, self.rollout_config, self._multiple
        )
        with self._autocast(), noise_at(self.noise, sequences.noisy.repeat(passes, 1)):
            words_NLD = self.model.transformer.wte(sequences.tokens)
            inputs_NLD = torch.where(
                sequences.thought[..., None], sequences.latents, words_NLD
            )
            hidden = self._encode(inputs_NLD.repeat(passes, 1, 1)).unflatten(
                0, (passes, rows)
            )
            logits_KMV = self.model.lm_head(
                hidden[:, sequences.rows, sequences.columns]
            ).float()
        losses_KM = F.cross_entropy(
            logits_KMV.flatten(0, 1), sequences.targets.repeat(passes), reduction="none"
        ).unflatten(0, (passes, -1))
        answer_N = losses_KM.new_zeros(rows).index_add(
            0, sequences.rows, -losses_KM.mean(0)
        )
        rows_N1 = torch.arange(rows, device=self.device)[:, None]
        return hidden[:, rows_N1, sequences.before_h].float(), answer_N

    def loss(
        self, prompts: Prompts, trajectories: Trajectories, rewards_BG
    ) -> torch.Tensor:
        """The surrogate loss, mean over prompts; its backward pass reaches `parameters`.

        Args:
            trajectories: of B*G rows, as from `rollout`.
            rewards_BG: float.
        """
        objective = self.objective
        steps = self.rollout_config.max_latents
        z_KNTD, answer_N = self._score(prompts, trajectories)
        h_NTD = trajectories.latents[:, : z_KNTD.shape[2]]
        lengths_N = trajectories.lengths
        terms = []
        # A term of weight 0 costs nothing.
        if objective.latent_weight:
            latent_N = latent_log_likelihood(h_NTD, z_KNTD, lengths_N, objective)
            terms.append(objective.latent_weight * latent_N)
        if objective.answer_weight:
            terms.append(objective.answer_weight * answer_N)
        if objective.stop_weight:
            logits_NT = self.sampler.stop_logits(h_NTD)
            stop_N = stop_log_likelihood(logits_NT, lengths_N, steps)
            terms.append(objective.stop_weight * stop_N)
        rewards = torch.as_tensor(np.array(rewards_BG, np.float32), device=self.device)
        advantages_BG = advantages(rewards, objective.advantage)
        return -(advantages_BG.flatten() * sum(terms)).mean()

    def accumulate(
        self, prompts: Prompts, trajectories: Trajectories, rewards_BG
    ) -> dict[str, float]:
        """Adds the loss's gradient to the parameters'; seconds of its forward (`surrogate`) and `backward` pass."""
        start = self._clock()
        loss = self.loss(prompts, trajectories, rewards_BG)
        middle = self._clock()
        loss.backward()
        return {"surrogate": middle - start, "backward": self._clock() - middle}

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def step(
        self, prompts: Prompts, references: Any, verify: Verify, lengths_N=None
    ) -> dict[str, float]:
        """One train step.

        Args:
            prompts: B left-padded prompts.
            references: handed to `verify` as they are.
            lengths_N: int [B*G], see `rollout`.
        Returns:
            seconds: `rollout`, `surrogate` (the loss's forward pass), `backward`, `other` (verification, clipping and
            optimizer), `step`.
        """
        group = self.group
        start = self._clock()
        self.sampled = self.rollout(prompts, group, lengths_N)
        rolled_out = self._clock()
        rewards_N = np.asarray(
            verify(self.sampled.tokens.cpu().numpy(), references), np.float32
        )
        self.optimizer.zero_grad(set_to_none=True)
        seconds = {"rollout": rolled_out - start}
        seconds |= self.accumulate(prompts, self.sampled, rewards_N.reshape(-1, group))
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        whole = self._clock() - start
        return {**seconds, "other": whole - sum(seconds.values()), "step": whole}

    @torch.inference_mode()
    def passk(
        self,
        prompt_rows: Sequence[np.ndarray],
        samples: int,
        batch_size: int,
        threshold: float,
        sort_by_length=False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gated Pass@k's rollouts: latents under dropout, the gate thresholded, answers greedy and clean.

        Args:
            prompt_rows: token ids of each problem.
            samples: rollouts a problem; a problem's stand in a row.
            batch_size: rollouts at a time, padded to the longest prompt of the batch.
            sort_by_length: batch problems of like length; the results' order is that of `prompt_rows`.
        Returns:
            tokens int [problems, samples, A] and tau int [problems, samples].
        """
        lengths = np.array([len(row) for row in prompt_rows])
        order = (
            np.argsort(lengths, kind="stable")
            if sort_by_length
            else np.arange(len(lengths))
        )
        index_N = np.repeat(order, samples)
        tokens_NA = np.empty((len(index_N), self.rollout_config.answer_slots), np.int64)
        lengths_N = np.empty(len(index_N), np.int64)
        for start in range(0, len(index_N), batch_size):
            batch = slice(start, start + batch_size)
            prompts = self._padded([prompt_rows[i] for i in index_N[batch]])
            sampled = self.rollout(prompts, 1, rule=threshold)
            tokens_NA[batch] = sampled.tokens.cpu().numpy()
            lengths_N[batch] = sampled.lengths.cpu().numpy()
        back = np.argsort(order)
        return tokens_NA.reshape(len(order), samples, -1)[back], lengths_N.reshape(
            len(order), samples
        )[back]

    def _padded(self, rows: Sequence[np.ndarray]) -> Prompts:
        """The rows, padded on the left to the longest."""
        slots = max(map(len, rows))
        tokens_NP = np.full((len(rows), slots), self.rollout_config.pad_id)
        valid_NP = (
            np.arange(slots) >= slots - np.array([len(row) for row in rows])[:, None]
        )
        tokens_NP[valid_NP] = np.concatenate(rows)
        return Prompts(tokens_NP, valid_NP)
