"""Decoding: diverse beams, and blocks of text for language models."""

import types

import numpy as np


def find_rows_of_the_batch(step, self, number, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
    """Tell diverse beam search in which row of its batch a sentence is.

    Upstream passes the sentences' numbers in the data and takes them for rows: fairseq-generate with
    --diverse-beam-groups stops with an IndexError, or holds the words of one sentence against another.
    """
    if number == 0:
        self.sentences = original_batch_idxs
    if original_batch_idxs is not None:
        original_batch_idxs = (original_batch_idxs[:, None] == self.sentences[None]).nonzero()[:, 1]
    return step(self, number, lprobs, scores, prev_output_tokens, original_batch_idxs)


def restore_numpy_name() -> None:
    """Give numpy 2 back the one name of numpy 1 that fairseq uses: blocks that end at sentences, as in LM decoding."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=np.int64)
