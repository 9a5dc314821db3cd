"""One file per registered model. fairseq imports this package once: whatever is to be registered is named here."""

from . import albert_encoder, transformer_lm_shared, transformer_shared  # noqa: F401
