"""A fairseq dictionary from the vocabulary of a folder of Hugging Face: its tokens, in fairseq's order."""

import json
from pathlib import Path

SPECIAL = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}  # fairseq's order
THEIR_NAMES = {"cls_token": "[CLS]", "pad_token": "<pad>", "sep_token": "[SEP]", "unk_token": "<unk>"}
THEIR_MASK = "[MASK]"


def read_json(file: Path) -> dict:
    """Read a JSON file; one that is not there is empty.

    Raises:
        ValueError: it is no JSON.
    """
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON, or truncated: {error}") from None


def read_vocabulary(folder: Path) -> dict[int, str]:
    """Return Hugging Face's tokens by id.

    Raises:
        ValueError: there is neither tokenizer.json nor spiece.model.
    """
    tokenizer = read_json(folder / "tokenizer.json")
    if tokenizer:
        listed = tokenizer["model"]["vocab"]
        tokens = {index: token for token, index in listed.items()} if isinstance(listed, dict) else {}
        tokens = tokens or {index: token for index, (token, *_) in enumerate(listed)}
        return tokens | {added["id"]: added["content"] for added in tokenizer.get("added_tokens", [])}
    file = folder / "spiece.model"
    if not file.is_file():
        raise ValueError(f"there is no tokenizer.json or spiece.model in {folder}, so no dictionary can be made")
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError):
        raise ValueError(f"{file} is no SentencePiece model, or truncated") from None
    return {index: model.id_to_piece(index) for index in range(len(model))}


def read_special(folder: Path) -> dict[str, str]:
    """Return how Hugging Face calls the tokens that fairseq has names of its own for."""
    found = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    special = {}
    for role, usual in {**THEIR_NAMES, "mask_token": THEIR_MASK}.items():
        token = found.get(role, usual)
        special[role] = token["content"] if isinstance(token, dict) else token
    return special


def order_symbols(vocabulary: dict[int, str], special: dict[str, str], size: int) -> tuple[list[str], list[int]]:
    """Put Hugging Face's tokens into fairseq's order.

    Args:
        vocabulary: tokens by id.
        special: the token of each role.
        size: rows of the table, which may be more than there are tokens.

    Returns:
        fairseq's symbols, and the row of each in Hugging Face's table.

    Raises:
        ValueError: a special token is missing, or an id is none of the table's.
    """
    if max(vocabulary) >= size:
        raise ValueError(f"token {vocabulary[max(vocabulary)]!r} has id {max(vocabulary)}, and vocab_size is {size}")
    ids = {token: index for index, token in vocabulary.items()}
    missing = [token for token in special.values() if token not in ids]
    if missing:
        raise ValueError(f"the vocabulary has no {missing[0]}, which fairseq needs a row for")
    places = [ids[special[role]] for role in SPECIAL]
    mask = ids[special["mask_token"]]
    rest = [index for index in range(size) if index not in {*places, mask}]
    symbols, taken = list(SPECIAL.values()), {*SPECIAL.values(), "<mask>"}
    for index in rest:
        symbol = vocabulary.get(index, "").strip()
        if not symbol or symbol in taken or " " in symbol or symbol.startswith("#fairseq"):
            symbol = f"madeupword{index:04d}"  # no text has it
        symbols.append(symbol)
        taken.add(symbol)
    return [*symbols, "<mask>"], [*places, *rest, mask]
