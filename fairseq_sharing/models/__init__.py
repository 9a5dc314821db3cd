"""One file per registered model. fairseq imports this package once: whatever is to be registered is named here."""

from . import (  # noqa: F401
    albert_encoder,
    s2t_transformer_shared,
    transformer_lm_shared,
    transformer_shared,
)
