"""GRPO's step on completions in words in PyTorch and transformers, as one would write it there, for `benchmarks.grpo`.

transformers' own batched `generate` rolls out. Scored are whole sequences without gaps, padded on the right to the
longest, with causal SDPA attention and no mask, and with logits at the completions' tokens alone; nothing is shared
between the completions of a prompt.
"""

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from benchmarks.witness.model import check_compiler
from benchmarks.witness.objective import advantages
from benchmarks.witness.step import Verify, make_optimizer
from slpo_jax.policy.policy import Prompts, RolloutConfig
from slpo_jax.training.optimizer import OptimizerConfig

_COMPILED_MULTIPLE = 16  # compiled passes pad their sequences to a multiple of it, so that few lengths are compiled


@dataclasses.dataclass
class Sequences:
    """Whole sequences [prompt | completion] of N rollouts, without gaps, padded on the right.

    Attributes:
        tokens: int64 [N, L].
        columns: int64 [N, A], whose logits predict the completion's tokens.
        targets: int64 [N, A], the completion.
        made: bool [N, A], its tokens up to and including the first end.
    """

    tokens: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor
    made: torch.Tensor


def make_sequences(
    prompts: Prompts,
    completions_NA: torch.Tensor,
    eos_ids: tuple[int, ...],
    multiple: int,
):
    """The `Sequences` of N completions of B prompts, a prompt's in a row; L is a multiple of `multiple`."""
    group = len(completions_NA) // len(prompts.tokens)
    tokens_NP = torch.tensor(np.array(prompts.tokens, np.int64)).repeat_interleave(
        group, 0
    )
    lengths_N1 = (
        torch.tensor(np.array(prompts.valid))
        .repeat_interleave(group, 0)
        .sum(1, keepdim=True)
    )
    slots = tokens_NP.shape[1]
    most = completions_NA.shape[1]
    source = torch.cat([tokens_NP, completions_NA], dim=1)
    longest = -(-(int(lengths_N1.max()) + most) // multiple) * multiple
    place_NL = torch.arange(longest) + slots - lengths_N1
    is_end_NA = torch.isin(completions_NA, torch.tensor(eos_ids))
    return Sequences(
        tokens=source.gather(1, place_NL.clamp(max=source.shape[1] - 1)),
        columns=lengths_N1 - 1 + torch.arange(most),
        targets=completions_NA,
        made=is_end_NA.cumsum(1) - is_end_NA.long() == 0,
    )


class Witness:
    """Model, optimizer and step; parameters and optimizer in float32.

    Attributes:
        model: transformers' LlamaForCausalLM.
        speaker: what generates: the model itself, or a copy in bfloat16 that each rollout takes anew.
        sampled: the last step's completions, int64 [N, A].
    """

    def __init__(
        self,
        folder: Path,
        config: RolloutConfig,
        clip: float | None,
        group: int,
        optimizer: OptimizerConfig,
        cache: str = "dynamic",
        compiled: bool = False,
        speaks_low: bool = False,
        scores_low: bool = False,
    ):
        """Reads the weights.

        Args:
            folder: what `from_pretrained` opens.
            config: of rollouts without latents, sampled from all tokens but `banned_ids`.
            clip: of the ratio, None for none.
            group: G.
            optimizer: name, learning rate and clip norm; the schedule and the weight decay are left out.
            cache: `generate`'s cache_implementation.
            compiled: torch.compile the scoring pass.
            speaks_low: generate in bfloat16.
            scores_low: score under autocast to bfloat16.
        Raises:
            ValueError: a setting that this implementation lacks.
            CompileError: `compiled`, and torch.compile doesn't work on this machine.
        """
        if (
            config.max_latents
            or config.dropout_rate
            or config.top_k
            or config.top_p < 1
            or not config.temperature
        ):
            raise ValueError(
                "the torch reference has completions in words alone, sampled from all tokens, no dropout"
            )
        kind = transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.config = config
        self.clip = clip
        self.group = group
        self.cache = cache
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.parameters, optimizer)
        self.clip_norm = optimizer.clip_norm
        self.sampled: torch.Tensor | None = None
        self.speaker = (
            copy.deepcopy(self.model).to(torch.bfloat16) if speaks_low else self.model
        )
        self._scoring = {
            "device_type": "cpu",
            "dtype": torch.bfloat16,
            "enabled": scores_low,
        }
        self._multiple = 1
        self._encode = self.model.model
        if compiled:
            check_compiler("cpu")
            self._multiple = _COMPILED_MULTIPLE
            self._encode = torch.compile(self.model.model, dynamic=False)

    def rollout(self, prompts: Prompts, tokens: int | None = None) -> torch.Tensor:
        """G completions of each prompt, a prompt's in a row: int64 [N, A'], A' the longest one's tokens.

        Args:
            prompts: B left-padded prompts, of numpy.
            tokens: of a completion at most; None is all that the config has room for.
        """
        config = self.config
        used = slice(int(np.asarray(prompts.valid).any(axis=0).argmax()), None)
        tokens_BP = torch.tensor(np.array(prompts.tokens[:, used], np.int64))
        if self.speaker is not self.model:
            with torch.no_grad():
                for own, trained in zip(
                    self.speaker.parameters(), self.parameters, strict=True
                ):
                    own.copy_(trained)
        out = self.speaker.generate(
            input_ids=tokens_BP,
            attention_mask=torch.tensor(np.array(prompts.valid[:, used], np.int64)),
            max_new_tokens=tokens or config.answer_slots, do_sample=True, temperature=config.temperature, top_k=0,
            top_p=1.0, num_return_sequences=self.group, cache_implementation=self.cache,
            suppress_tokens=list(config.banned_ids) or None,
            eos_token_id=list(config.eos_ids), pad_token_id=config.pad_id,
        )  # fmt: skip
        return out[:, tokens_BP.shape[1] :]

    def log_probs(self, sequences: Sequences) -> torch.Tensor:
        """float32 [N, A], of the completions' tokens."""
        with torch.autocast(**self._scoring):
            hidden_NLD = self._encode(
                input_ids=sequences.tokens, use_cache=False
            ).last_hidden_state
            rows_N1 = torch.arange(len(hidden_NLD))[:, None]
            logits_NAV = self.model.lm_head(hidden_NLD[rows_N1, sequences.columns])
        losses = F.cross_entropy(
            logits_NAV.flatten(0, 1).float(),
            sequences.targets.flatten(),
            reduction="none",
        )
        return -losses.unflatten(0, sequences.targets.shape)

    def accumulate(
        self, prompts: Prompts, completions_NA: torch.Tensor, rewards_BG: np.ndarray
    ) -> float:
        """Adds the gradient of GRPO's loss to the parameters'; the loss, the mean over completions of their own means.

        -min(rho A_i, clip(rho) A_i) of every token, rho = pi / pi of the rollout, which is the policy of now.
        """
        advantages_N = advantages(
            torch.tensor(np.array(rewards_BG, np.float32)), "grpo"
        ).flatten()
        sequences = make_sequences(
            prompts, completions_NA, self.config.eos_ids, self._multiple
        )
        log_probs_NA = self.log_probs(sequences)
        ratio_NA = torch.exp(log_probs_NA - log_probs_NA.detach())
        gains_NA = ratio_NA * advantages_N[:, None]
        if self.clip is not None:
            clipped_NA = (
                ratio_NA.clamp(1 - self.clip, 1 + self.clip) * advantages_N[:, None]
            )
            gains_NA = torch.minimum(gains_NA, clipped_NA)
        means_N = torch.where(sequences.made, gains_NA, 0.0).sum(
            1
        ) / sequences.made.sum(1)
        loss = -means_N.mean()
        loss.backward()
        return loss.item()

    def step(
        self, prompts: Prompts, references: Any, verify: Verify
    ) -> dict[str, float]:
        """One train step.

        Args:
            prompts: B left-padded prompts, of numpy.
            references: handed to `verify` as they are.
        Returns:
            seconds: `rollout`, `gradient` (the loss, forward and backward), `other` (verification, clipping and
            optimizer), `step`.
        """
        start = time.perf_counter()
        self.sampled = self.rollout(prompts)
        rolled_out = time.perf_counter()
        rewards_N = np.asarray(verify(self.sampled.numpy(), references), np.float32)
        self.optimizer.zero_grad(set_to_none=True)
        verified = time.perf_counter()
        self.accumulate(prompts, self.sampled, rewards_N.reshape(-1, self.group))
        scored = time.perf_counter()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        seconds = {"rollout": rolled_out - start, "gradient": scored - verified}
        whole = time.perf_counter() - start
        return {**seconds, "other": whole - sum(seconds.values()), "step": whole}
