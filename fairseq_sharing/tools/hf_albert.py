"""`albert_encoder` and Hugging Face's ALBERT: which tensor of the one is which of the other.

Both compute the same (tests/test_albert_encoder.py). They differ in names, in the order of the symbols, and in these:
fairseq's first position is padding_idx + 1 = 2; Hugging Face adds a segment to every position; it has a layer E -> H
also where E = H; its pooler and classifier are fairseq's classification head.
"""

TABLE = "encoder.sentence_encoder.embed_tokens.weight"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
FIRST_POSITION = 2
LAYERS = "encoder.sentence_encoder.layers"
OUTPUT = "encoder.lm_head.weight"
OUTPUT_BIAS = "encoder.lm_head.bias"
PROJECTION = "encoder.sentence_encoder.embed_tokens.projection"
HEADS = "classification_heads"

THEIR_TABLE = "albert.embeddings.word_embeddings.weight"
THEIR_POSITIONS = "albert.embeddings.position_embeddings.weight"
THEIR_SEGMENTS = "albert.embeddings.token_type_embeddings.weight"
THEIR_GROUPS = "albert.encoder.albert_layer_groups"
THEIR_OUTPUT = "predictions.decoder.weight"
THEIR_OUTPUT_BIASES = ("predictions.bias", "predictions.decoder.bias")  # one parameter with two names
THEIR_PROJECTION = "albert.encoder.embedding_hidden_mapping_in"

# Modules with weight and bias, theirs -> ours.
MODULES = {
    "albert.embeddings.LayerNorm": "encoder.sentence_encoder.layernorm_embedding",
    "predictions.dense": "encoder.lm_head.dense",
    "predictions.LayerNorm": "encoder.lm_head.layer_norm",
}
# The same within a layer.
LAYER_MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.dense": "self_attn.out_proj",
    "attention.LayerNorm": "self_attn_layer_norm",
    "ffn": "fc1",
    "ffn_output": "fc2",
    "full_layer_layer_norm": "final_layer_norm",
}
# The same in a classification head.
HEAD_MODULES = {"albert.pooler": "dense", "classifier": "out_proj"}
# fairseq's names of activations -> Hugging Face's, those that compute the same.
ACTIVATIONS = {
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "swish": "silu",
    "tanh": "tanh",
    "linear": "linear",
}


def order_of_groups(num_layers: int, num_groups: int) -> list[int]:
    """Return the group that Hugging Face uses at each step, by its own formula.

    6 steps, 3 groups:

    >>> order_of_groups(6, 3)
    [0, 0, 1, 1, 2, 2]
    """
    return [int(step / (num_layers / num_groups)) for step in range(num_layers)]


def find_groups(owners: list[int]) -> list[tuple[int, ...]] | None:
    """Say an assignment in Hugging Face's terms: groups of `inner_group_num` layers, each group used in one run.

    SEQUENCE is groups of one layer; CYCLE is one group of M layers.

    >>> find_groups([0, 0, 1, 1]), find_groups([0, 1, 0, 1]), find_groups([0, 1, 1, 0])
    ([(0,), (1,)], [(0, 1)], None)

    Args:
        owners: the layer that owns the parameters of each of the N layers.

    Returns:
        The layers of each group, or None where no groups without copies say it.
    """
    num_layers = len(owners)
    for inner in range(1, num_layers + 1):
        if num_layers % inner:
            continue
        blocks = [tuple(owners[start : start + inner]) for start in range(0, num_layers, inner)]
        groups = list(dict.fromkeys(blocks))
        used = [groups.index(block) for block in blocks]
        if len(groups) * inner == len(set(owners)) and used == order_of_groups(len(blocks), len(groups)):
            return groups
    return None
