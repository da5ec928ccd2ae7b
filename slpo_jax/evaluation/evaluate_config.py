"""The section `config.evaluate`."""

import dataclasses

from slpo_jax.settings import FieldError, check_fields, setting


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What is evaluated, and how.

    Attributes:
        datasets: names under config.data.eval; None is all.
        limit: problems a set; 0 is all.
        batch_size: rollouts at a time; no figure depends on it.
        prompt_multiple: problems whose prompts fit the same multiple of this (or config.prompt_slots) share batches;
            each is compiled.
        samples: k of Pass@k, rollouts under noise for each problem and seed; 0 is Acc alone.
        seeds: seeds of the noise, for Pass@k and its standard error.
        dropout: dropout rate of these rollouts; None is config.dropout.rate.
        temperature: temperature of the answers in these rollouts, which are greedy in Acc; 0 is greedy here too.
        top_k: likeliest tokens that they are sampled from; 0 is all.
        top_p: then the likeliest of these that have this probability together; 1 is all.
        max_answer_tokens: A, the maximum of new tokens; None is config.max_answer_tokens.
        scorers: the report has best-of-k and score-weighted votes by each.
        reward_model: model of the scorer latent_rm: WORKDIR/checkpoints/latent_rm of another run, or one in its
            authors' layout, a directory, file or hub id; "" is this run's.
        beams: beams of a search over latents by latent_rm, see `evaluation.beam`; 0 is none.
        candidates: candidates for each beam's next latent.
        by_steps: without a gate, a problem's thought has as many latents as the problem has steps, T at most: it is
            told how far to think, as in the published evaluation of recipe frontier.
        thresholds: the gate's thresholds that are tried on the validation split.
        probed: problems a set whose latents' stop probabilities and nearest tokens are kept.
        save_latents: also write eval/ROW/NAME.latents.npz.
    """

    datasets: tuple[str, ...] | None = None
    limit: int = setting(0, least=0, note="0 is all problems")
    batch_size: int = setting(512, least=1, affects="nothing")
    prompt_multiple: int = setting(32, least=1, affects="nothing")
    samples: int = setting(16, least=0, note="0 is Acc alone")
    seeds: int = setting(3, least=1)
    dropout: float | None = setting(None, least=0, below=1, note="None is config.dropout.rate", affects="rollouts")
    temperature: float = setting(0.0, least=0, affects="rollouts")
    top_k: int = setting(0, least=0, note="0 is all", affects="rollouts")
    top_p: float = setting(1.0, above=0, most=1, affects="rollouts")
    max_answer_tokens: int | None = setting(None, least=1, note="None is config.max_answer_tokens", affects="rollouts")
    scorers: tuple[str, ...] = ()
    reward_model: str = ""
    beams: int = setting(0, least=0, note="0 is none")
    candidates: int = setting(8, least=1)
    by_steps: bool = setting(False, affects="rollouts")
    thresholds: tuple[float, ...] = setting((0.5, 0.6, 0.7, 0.8, 0.9), least=0, most=1, fewest=1)
    probed: int = setting(20, least=0, note="0 is none", affects="nothing")
    save_latents: bool = False

    @property
    def used_seeds(self) -> int:
        """Of Pass@k, if there is any."""
        return self.seeds if self.samples else 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("thresholds", "datasets", "scorers"):
            values = getattr(self, name) or ()
            if len(set(values)) < len(values):
                raise FieldError(self, name, "give each once")
