"""A tokenizer of Hugging Face that gives the ids of a fairseq dictionary, from the SentencePiece model.

fairseq's ids are those of its dictionary, which begins with its own four symbols and lists the pieces by frequency; so
the vocabulary is the dictionary, with SentencePiece's scores. Pieces that the dictionary lacks follow behind it:
SentencePiece still cuts them, and fairseq reads them as ``<unk>``. Normalisation is the model's own, lower case or
not. Hugging Face's AlbertTokenizer would add its own: lower case, no accents, [CLS] and [SEP] at fixed places.
"""

import re
from pathlib import Path

SPACE = "\u2581"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # in the order of fairseq's dictionary
MASK = "<mask>"
# Types of pieces in a SentencePiece model.
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
UNIGRAM, BPE = 1, 2


def read_sentencepiece(path: str):
    """Return the description of a SentencePiece model.

    Raises:
        ValueError: it is no model whose pieces Hugging Face's tokenizers can cut.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(Path(path).read_bytes())
    if model.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise ValueError(f"--sentencepiece-model {path} is neither a unigram nor a BPE model")
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError(f"--sentencepiece-model {path} was trained with --treat_whitespace_as_suffix")
    return model


def build_tokenizer(sentencepiece_model: str, symbols: list[str]):
    """Build a tokenizer whose ids are places in ``symbols``.

    Args:
        sentencepiece_model: path of the model.
        symbols: the dictionary, ``<mask>`` included.

    Returns:
        The tokenizer, and the pieces that are not in the dictionary: their ids follow behind it.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    model = read_sentencepiece(sentencepiece_model)
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED, BYTE)}
    place = set(symbols)
    unread = [piece for piece in scores if piece not in place]
    # A symbol that no text is cut into gets a name with a space in it, which no text has after normalisation.
    special = {*SPECIAL, MASK}
    vocabulary = [symbol if symbol in scores or symbol in special else f" {symbol}" for symbol in [*symbols, *unread]]
    tokenizer = Tokenizer(build_model(model, vocabulary, scores))
    tokenizer.normalizer = build_normalizer(model.normalizer_spec)
    tokenizer.pre_tokenizer = build_pre_tokenizer(model)
    tokenizer.decoder = build_decoder(model)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if MASK in place:  # fairseq's hub ends the text before it where the words end
        tokenizer.add_special_tokens([AddedToken(MASK, special=True, normalized=False, lstrip=True)])
    start, _, end, _ = SPECIAL
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start}:0 $A:0 {end}:0",
        pair=f"{start}:0 $A:0 {end}:0 {end}:0 $B:0 {end}:0",
        special_tokens=[(start, 0), (end, 2)],
    )
    return tokenizer, unread


def build_model(model, vocabulary: list[str], scores: dict[str, float]):
    """Return how words are cut: by the scores of a unigram model, or by the merges of a BPE model."""
    from tokenizers import models

    byte_fallback, unknown = model.trainer_spec.byte_fallback, SPECIAL.index("<unk>")
    if model.trainer_spec.model_type == UNIGRAM:
        # The lowest score counts: what no piece covers costs 10 more than it.
        lowest = min(piece.score for piece in model.pieces if piece.type == NORMAL)
        scored = [(symbol, scores.get(symbol, lowest)) for symbol in vocabulary]
        return models.Unigram(scored, unk_id=unknown, byte_fallback=byte_fallback)
    ranks = {piece.piece: (-piece.score, rank) for rank, piece in enumerate(model.pieces) if piece.type == NORMAL}
    merges = sorted(
        (*rank, piece[:split], piece[split:])
        for piece, rank in ranks.items()
        for split in range(1, len(piece))
        if piece[:split] in ranks and piece[split:] in ranks
    )
    return models.BPE(
        vocab={symbol: index for index, symbol in enumerate(vocabulary)},
        merges=[(left, right) for _, _, left, right in merges],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=byte_fallback,
        ignore_merges=bool(user_defined(model)),
    )


def user_defined(model) -> list[str]:
    """Return the pieces that are never cut, longest first."""
    return sorted((piece.piece for piece in model.pieces if piece.type == USER_DEFINED), key=len, reverse=True)


def build_normalizer(settings):
    """Return SentencePiece's normalisation: its table of characters, then spaces."""
    from tokenizers import Regex, normalizers

    steps = []
    if settings.precompiled_charsmap:
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    if settings.add_dummy_prefix:  # Metaspace adds none where the text has one, SentencePiece does
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2))
    return normalizers.Sequence(steps)


def build_pre_tokenizer(model):
    """Return what comes before cutting: the space before the first word, and pieces that stay whole."""
    from tokenizers import Regex, pre_tokenizers

    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    steps = [pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)]
    if user_defined(model):
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, user_defined(model)))), behavior="isolated"))
    return pre_tokenizers.Sequence(steps)


def build_decoder(model):
    """Return how pieces become text again."""
    from tokenizers import decoders

    steps = [decoders.Replace(SPACE, " ")]
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


def tokenizer_settings(max_positions: int) -> dict:
    """Return tokenizer_config.json."""
    start, pad, end, unknown = SPECIAL
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **{"bos_token": start, "cls_token": start, "pad_token": pad, "eos_token": end, "sep_token": end},
        **{"unk_token": unknown, "mask_token": MASK},
    }
