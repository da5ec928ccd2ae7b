"""Tokenizers: small word-level ones for generated problems, and Hugging Face's for real models.

torch is not needed: everything here rests on the `tokenizers` library through transformers' fast tokenizers.
transformers takes seconds to import, so that is done where one is made.
"""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from slpo_jax.data.generated import GENERATED
from slpo_jax.data.tokenizer_files import GPT2_EOS, read_tokenizer
from slpo_jax.errors import UserError, key_name
from slpo_jax.io.files import is_hub_id, snapshot
from slpo_jax.settings import FieldError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START_LATENT = "<|start-latent|>"
END_LATENT = "<|end-latent|>"
LATENT = "<|latent|>"
WORDS = "words"  # a tokenizer that is made of the training data
BYTES = "bytes"
NODES = "nodes"  # of graphs whose nodes are numbers
PAD_LATENT = "[PAD]"  # CODI's own pad token, the first that it adds
COCONUT_TOKENS = (START_LATENT, END_LATENT, LATENT)
ANSWER_MARK = "###"
TEXT_ANSWER = "####"  # as GSM8K's solutions have it
PAD = "<pad>"
UNK = "<unk>"
EOS = "<eos>"


def task_tokenizer(task: str, number: int) -> "PreTrainedTokenizerFast":
    """Make a word-level tokenizer for a generated task: one token a word.

    Words are separated by white space; a line break is a token of its own. Decoding joins the tokens with single
    spaces, so that it gives the text back up to white space.

    Args:
        task: one of `GENERATED`.
        number: see `generated.Task.words`.
    Returns:
        a fast tokenizer with `<pad>`, `<unk>`, `<eos>` (ids 0, 1, 2) and, last, COCONUT's three latent tokens.
    Raises:
        UserError: the number is out of range.
    """
    try:
        words = GENERATED[task].words(number)
    except FieldError as error:
        raise UserError(
            "config.tokenizer", f"{task}:{number}: {error.problem}"
        ) from None
    tokens = [PAD, UNK, EOS, "\n", ANSWER_MARK, *words, *COCONUT_TOKENS]
    return _word_level(tokens, PAD)


def nodes_tokenizer(largest: int) -> "PreTrainedTokenizerFast":
    """Make the word-level tokenizer of Zhu et al. (2025) for graphs: node n is token n, and eos pads.

    Args:
        largest: published with 30, which are 40 tokens. The last, which no text of theirs has, stands here for what is
            unknown.
    """
    nodes = map(str, range(largest + 1))
    tokens = [*nodes, *COCONUT_TOKENS, "|", "[Q]", "[R]", "[A]", EOS, UNK]
    return _word_level(tokens, EOS)


def _word_level(tokens: Sequence[str], pad: str) -> "PreTrainedTokenizerFast":
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"),
        ]
    )
    special_tokens: list[AddedToken] = []
    for token in dict.fromkeys((pad, UNK, EOS, *COCONUT_TOKENS)):
        special_tokens.append(AddedToken(token, special=True, normalized=False))
    backend.add_special_tokens(special_tokens)
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, unk_token=UNK, eos_token=EOS
    )


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Make a tokenizer for any text: a token a byte, whose value is its id, and GPT-2's end."""
    backend = Tokenizer(models.BPE(_byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=GPT2_EOS
    )


def words_of(texts: Iterable[str], most: float = math.inf) -> list[str]:
    """Return the different words of these texts, in alphabetical order: runs of letters, digits or other signs.

    They are cut as GPT-2's are, the space before them included, and one stands before each text.

    Args:
        most: [] stands for more.
    """
    chunks = set[str]()
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in filter(None, texts):
        if text[:1] != " ":
            text = f" {text}"
        # What lies between spaces is cut alike wherever it stands, and most of it comes many times.
        chunks.update(re.findall(r"\s*\S+|\s+", text))
        if len(chunks) > 10 * most:
            return []
    words: set[str] = set()
    for chunk in chunks:
        for word, _ in cut.pre_tokenize_str(chunk):
            words.add(word)
    if len(words) > most:
        return []
    return sorted(words)


def words_tokenizer(words: Sequence[str]) -> "PreTrainedTokenizerFast":
    """Make a tokenizer of these words alone.

    Decoding gives a text back to the byte, with a space in front of it.

    Args:
        words: of `words_of`.
    Returns:
        a fast tokenizer with `<pad>`, `<unk>` (ids 0 and 1), the words, and then `<eos>`, which is no word. Some
        programs, as lm-eval, pad with 0 without saying so.
    """
    tokens = [PAD, UNK, *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, unk_token=UNK, pad_token=PAD
    )


def load_tokenizer(source: str) -> "PreTrainedTokenizerFast":
    """Load a tokenizer.

    Args:
        source: "synthetic:N", "chain:N" or "graph:N" (`task_tokenizer`), "nodes:N" (`nodes_tokenizer`), "bytes"
            (`byte_tokenizer()`), a directory with tokenizer.json or with GPT-2's bare vocab.json and merges.txt, or a
            Hugging Face hub id.
    Returns:
        a fast tokenizer as it is in the source; see `add_reasoner_tokens` for what a reasoner needs on top.
    Raises:
        UserError: there's no such tokenizer, it can't be reached, or it can't be used as it is.
    """
    kind, colon, number = source.partition(":")
    if colon and kind in (NODES, *GENERATED):
        if not number.isdecimal():
            raise UserError(
                "config.tokenizer",
                f"{source}: its number is missing; write e.g. {kind}:30",
            )
        if kind == NODES:
            return nodes_tokenizer(int(number))
        return task_tokenizer(kind, int(number))
    if source == BYTES:
        return byte_tokenizer()
    if source == WORDS:
        raise UserError(
            "config.tokenizer",
            "words are the training data's, of a model that begins with random "
            "weights; leave it out",
        )
    directory = Path(source).expanduser()
    if directory.is_dir():
        return read_tokenizer(directory)
    if not is_hub_id(source):
        raise UserError(
            "config.tokenizer",
            f"{source}: no such directory; give a directory, a hub id or synthetic:N",
        )
    return read_tokenizer(snapshot(source, "config.tokenizer"))


def has_latent_tokens(
    tokenizer: "PreTrainedTokenizerFast",
    markers: tuple[str, str] = (START_LATENT, END_LATENT),
) -> bool:
    """Tell whether a tokenizer knows, by name, the tokens that start and end a thought."""
    return {*markers} <= tokenizer.get_vocab().keys()


def add_reasoner_tokens(
    tokenizer: "PreTrainedTokenizerFast",
    names: tuple[str, ...] = COCONUT_TOKENS,
    first_id: int | None = None,
    markers: tuple[str, str] = (START_LATENT, END_LATENT),
) -> dict[str, Any]:
    """Find the latent tokens by name; where start or end is missing, add all that are, at the published ids.

    So COCONUT gets start, end and latent at 50257..50259 on GPT-2 and 128256..128258 on Llama-3, CODI pad, start (bot)
    and end (eot). All become special tokens, and a missing pad token becomes CODI's, or else eos. The tokenizer is
    changed in place; a second call changes nothing.

    Args:
        tokenizer: the base model's or the reasoner's tokenizer.
        names: in the order of their ids.
        first_id: id of the first token to be added, the size of the base model's vocabulary (ids up to it that no token
            has are filled); None for the first id that is free.
        markers: of the names, those that start and end a thought.
    Returns:
        the ids that a `templates.Template` has as fields; CODI has none that stands for a latent.
    Raises:
        UserError: the tokenizer has no eos token, or more tokens than the model.
    """
    # Ids of the model that no token has are filled, so that the added tokens come behind them.
    has_latent = has_latent_tokens(tokenizer, markers)
    if not has_latent and first_id is not None:
        if len(tokenizer) > first_id:
            raise UserError(
                f"tokenizer: has {len(tokenizer)} tokens, the model's vocabulary {first_id}; give the model's own "
                f"tokenizer ({key_name('config.tokenizer')}, {key_name('config.base')})"
            )
        free_ids = range(len(tokenizer), first_id)
        fillers = [f"<|unused-{index}|>" for index in free_ids]
        tokenizer.add_tokens(fillers, special_tokens=True)
    # Checkpoints may have them as ordinary added tokens; adding a known one again keeps its id and makes it special.
    present: list[AddedToken] = []
    for name in names:
        if not has_latent or name in tokenizer.get_vocab():
            token = AddedToken(name, special=True, normalized=False)
            present.append(token)
    tokenizer.add_tokens(present, special_tokens=True)

    # A missing pad token becomes CODI's.
    ids = tokenizer.get_vocab()
    if tokenizer.pad_token is None and PAD_LATENT in ids:
        tokenizer.pad_token = PAD_LATENT
    start, end = markers
    return {
        "start_id": ids[start],
        "closing_ids": (ids[end],),
        "latent_id": ids.get(LATENT),
        **end_ids(tokenizer),
    }


def end_ids(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return the ids that any `templates.Template` has: of the end, and of padding, the end's if need be.

    Raises:
        UserError: the tokenizer has no eos token.
    """
    if tokenizer.eos_token is None:
        raise UserError(
            "tokenizer: has no eos token, so that answers couldn't end; set eos_token in its config"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return {"eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}


def add_words(
    tokenizer: "PreTrainedTokenizerFast", text: str, apart: bool = True
) -> None:
    """Give a word-level tokenizer the words of a text that it lacks, in place.

    Other tokenizers can spell them, or were made of them (`words_tokenizer`).

    Args:
        apart: they stand for themselves only where nothing touches them.
    """
    backend = tokenizer.backend_tokenizer
    is_word_level = isinstance(backend.model, models.WordLevel)
    if not is_word_level or backend.decoder is not None:
        return
    vocabulary = tokenizer.get_vocab()
    missing: list[AddedToken] = []
    for word in text.split():
        if word not in vocabulary:
            token = AddedToken(word, single_word=apart, normalized=False)
            missing.append(token)
    tokenizer.add_tokens(missing)


def token_bytes(tokenizer: "PreTrainedTokenizerFast") -> list[bytes]:
    """Return the bytes that each id stands for, for the device verifier.

    For byte-level BPE the concatenation over a sequence is exactly the UTF-8 text that `decode(ids,
    skip_special_tokens=True)` gives (which shows bytes that are no UTF-8 as U+FFFD). For word-level tokenizers every
    token is a space and its word, so that there the concatenation has one more space, at the beginning. Special
    tokens, and ids that no token has, are empty.

    Args:
        tokenizer: a fast tokenizer, with all its tokens added.
    Returns:
        a list with an entry for every id from 0 to the largest.
    Raises:
        UserError: the tokenizer's decoder isn't one of those two kinds.
    """
    backend = tokenizer.backend_tokenizer
    by_id = {}
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        by_id[index] = token
    special = set()
    for index, token in backend.get_added_tokens_decoder().items():
        if token.special:
            special.add(index)
    if isinstance(backend.decoder, decoders.ByteLevel):
        to_bytes = _byte_level_bytes
    elif isinstance(backend.model, models.WordLevel) and backend.decoder is None:
        to_bytes = _word_level_bytes
    else:
        model = type(backend.model).__name__
        decoder = type(backend.decoder).__name__
        kind = f"{model} with decoder {decoder}"
        raise UserError(
            f"tokenizer: {kind} can't be mapped to bytes; use a byte-level BPE or a word-level tokenizer"
        )
    pieces: list[bytes] = []
    for index in range(max(by_id) + 1):
        piece = b""
        if index in by_id and index not in special:
            piece = to_bytes(by_id[index])
        pieces.append(piece)
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """Return the printable character that byte-level BPE writes for each byte, as in GPT-2.

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and up.
    """
    visible = [
        *range(0x21, 0x7F),
        *range(0xA1, 0xAD),
        *range(0xAE, 0x100),
    ]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    for rank, byte in enumerate(hidden):
        sign = chr(0x100 + rank)
        alphabet[sign] = byte
    return alphabet


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    # As the library's decoder does: a token with any character outside the alphabet is plain text.
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _word_level_bytes(token: str) -> bytes:
    return b" " + token.encode()
