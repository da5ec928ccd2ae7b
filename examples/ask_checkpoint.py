"""Ask a published latent reasoner: `python examples/ask_checkpoint.py [CHECKPOINT] [QUESTION]`.

The default is COCONUT on GPT-2 (124M), which is downloaded from the Hugging Face hub. A directory does as well. The
script prints the answer, and for each latent the tokens that its hidden state makes likeliest.
"""

import sys

import slpo_jax as slpo

CHECKPOINT = "ModalityDance/latent-tts-coconut"
QUESTION = (
    "Tom has 3 boxes of 12 pens. He gives 7 pens away. How many pens has he left?"
)


def main(
    checkpoint: str = CHECKPOINT, question: str = QUESTION, latents: int = 6
) -> slpo.Solution:
    """Load the checkpoint and ask it.

    Args:
        checkpoint: a directory or hub id of COCONUT, CODI or CoLaR.
        latents: of each thought, since published reasoners have no gate.
    """
    reasoner = slpo.load(checkpoint, latents=latents)
    solution = reasoner.solve(question, samples=16)
    print(f"answer: {solution.answer}, from the text {solution.text!r}")
    print(f"majority of 16 samples: {solution.votes.majority}")
    for number, latent in enumerate(solution.latents, start=1):
        print(f"latent {number}: {latent.likeliest[:3]}")
    return solution


if __name__ == "__main__":
    main(*sys.argv[1:])
