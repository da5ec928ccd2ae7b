"""What a reasoner's texts mean to a device: where its stop strings end an answer, and when an answer is right."""

from slpo_jax.errors import UserError
from slpo_jax.policy.prompted import RewardFn
from slpo_jax.rewards.ending import StopStrings, text_tokens
from slpo_jax.rewards.stopping import stop_tables
from slpo_jax.rewards.verifier import byte_table, verify
from slpo_jax.text.templates import Template
from slpo_jax.text.tokenizer import token_bytes


def make_reading(template: Template, vocabulary: int) -> tuple[StopStrings | None, RewardFn]:
    """The automaton of `config.prompt.stop`, None without any, and the reward.

    Args:
        vocabulary: the model's rows of embeddings.
    Raises:
        UserError: a stop string that the tokens can't write.
    """
    # Names may be missing at the end of a vocabulary that was padded.
    pieces = [*token_bytes(template.tokenizer)]
    pieces += [b""] * (vocabulary - len(pieces))
    pieces.append(b"")  # which is what -1, no token, finds
    stops, style = None, template.answer_style
    cut_pieces: list[bytes] = []
    if template.stop:
        try:
            fields, cut_pieces = stop_tables(template.stop, pieces)
        except UserError as error:
            raise UserError(f"config.prompt.stop: {error}") from None
        stops = StopStrings(**fields)
    table = byte_table([*pieces, *cut_pieces])

    def reward(tokens_NA, references_NR):
        read = text_tokens(tokens_NA, template.eos_ids, stops)
        return verify(table, read, references_NR, template.eos_id, style)

    return stops, reward
