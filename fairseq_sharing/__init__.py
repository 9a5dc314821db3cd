"""fairseq_sharing: Transformers for fairseq whose layers share parameters.

Give this folder to ``fairseq-train --user-dir``. The idea (Takase & Kiyono, arXiv 2104.06022) is in `strategies`; one
mechanism, `sharing`, ties an existing stack of layers to it; the models are fairseq's plus that one call.

    strategies     (N, M) -> assignment, the parameter set of each layer
    sharing        tie a stack of layers to an assignment
    embedding      V x E and E x H in place of V x H
    residual       Admin: scaled residual connections
    gradients      the gradient norm that each layer contributes
    attention      keys and values of the encoder output once for each parameter set
    inference      packed matrices for decoding on the CPU
    checkpoint     one copy of each tensor when saving, ties restored and compared when loading
    options        the flags
    arguments      flags -> assignment
    refusals       fairseq's options that cannot be right with shared layers
    shared_model   what every model adds to fairseq's: flags, tie, hooks
    architecture   defaults and checks that the architectures have in common
    upstream       the few changes to fairseq itself
    models         one file per registered model
    tools          the command ``fairseq-sharing``

Symbols in comments and docstrings:
    N  layers in a stack          M  parameter sets in a stack
    B  sentences in a batch       T  positions in a sentence
    C  channels, the model width  V  symbols in the dictionary
    E  width of a factorised embedding    H  hidden width where it differs from E
"""

import importlib.util
import logging

__version__ = "0.1.0"

# Without fairseq only the command line and `strategies` are of use; the command says what to install.
if importlib.util.find_spec("fairseq") is not None:
    # fairseq's text-to-speech task asks for tensorboardX whenever it is imported; tensorboard is enough here.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    from . import checkpoint, upstream

    upstream.apply()
    upstream.hooks.LOADING_CHECKS.append(checkpoint.refuse_into_stock_model)
    from . import models  # noqa: F401
    from .shared_model import check_training_run

    upstream.hooks.TRAINING_CHECKS.append(check_training_run)
