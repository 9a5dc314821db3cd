"""Operations of a training's forward pass, by component.

They come from torch's own counter, which sees every matrix product and convolution over fake tensors: each of N layers
counts, whatever it shares, and keys and values of the encoder output count once for the layers that take them from one
another (see `attention`).
"""

import re

from fairseq.modules import AdaptiveInput
from torch.utils.flop_counter import FlopCounterMode

from .fake_training import fake_training, run_forward
from .model import paths_of, stacks_of
from .sizes import COMPONENTS

# The modules of the head whose operations add up; an adaptive softmax is not called as a whole.
HEADS = re.compile(r"decoder\.(project_out_dim|output_projection|adaptive_softmax\.(head|tail\.\d+))|encoder\.lm_head")


def count_flops(model, source_length: int, target_length: int) -> dict[str, float]:
    """Return floating-point operations of a training's forward pass by component, per token of the target.

    A multiplication and its addition count as two. Counted are matrix products, attention among them (all T x T of
    it, as it is computed without a fused kernel), and convolutions. The source's share is in it: S / T of its tokens
    for each token of the target. With an adaptive input all words are of its first band, the most costly; an adaptive
    softmax gives every symbol its score.

    Args:
        model: a model of fake tensors.
        source_length: S, tokens or frames.
        target_length: T; 0 for a masked language model, whose only text is the source.

    Raises:
        ValueError: the forward pass asks for more than shapes.
    """
    paths = paths_of(model)
    embedding = getattr(getattr(model, "decoder", None), "embed_tokens", None)
    try:
        if isinstance(embedding, AdaptiveInput):
            model.decoder.embed_tokens = embedding.embeddings[0]
        counter = FlopCounterMode(display=False)
        with fake_training(model, source_length), counter:
            run_forward(model, source_length, target_length)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"the forward pass of {type(model).__name__} cannot be followed: {error}") from error
    finally:
        if embedding is not None:
            model.decoder.embed_tokens = embedding
    counts = {name.partition(".")[2]: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    flops = {
        stack: sum(counts.get(f"{path}.{i}", 0) for i in range(len(stacks_of(model)[stack])))
        for stack, path in paths.items()
    }
    flops["convolutions"] = counts.get("encoder.subsample", 0)
    flops["head"] = sum(value for name, value in counts.items() if HEADS.fullmatch(name))
    flops["embeddings"] = counter.get_total_flops() - sum(flops.values())
    return {name: flops[name] / (target_length or source_length) for name in COMPONENTS if flops.get(name)}
