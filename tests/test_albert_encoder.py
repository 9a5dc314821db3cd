"""The invariants of `albert_encoder`, its published counts, Hugging Face's ALBERT beside it, and fairseq's commands."""

import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import PLUGIN, REPOSITORY, build_dictionary, run
from fairseq import options
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.tasks import setup_task
from fairseq.utils import get_activation_fn
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_sharing.checkpoint import RECORD
from fairseq_sharing.embedding import FactorizedEmbedding
from fairseq_sharing.models.albert_encoder import SIZES, AlbertEncoderModel
from fairseq_sharing.tools.main import main

LAYERS = [
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "2"),
    *("--encoder-layers", "4", "--max-positions", "40"),
]
TINY = [*LAYERS, "--factorized-embed-dim", "8"]
# What sets ALBERT apart from RoBERTa apart from sharing and width.
AS_ROBERTA = ["--factorized-embed-dim", "16", "--layernorm-eps", "1e-5", "--activation-fn", "gelu"]
SHARED = {
    "all": [],
    "two groups": ["--encoder-unique-layers", "2"],
    "cycle": ["--encoder-sharing", "cycle", "--encoder-unique-layers", "2"],
    "cycle_rev": ["--encoder-sharing", "cycle_rev", "--encoder-unique-layers", "2"],
    "assignment": ["--encoder-assignment", "0,1,0,0"],
}
# Flags of upstream's RoBERTa that must go on working.
VARIANTS = {
    "post-LN": [],
    "pre-LN": ["--encoder-normalize-before"],
    "untied output": ["--untie-weights-roberta"],
    "layerdrop": ["--encoder-layerdrop", "0.3"],
    "product quantisation": ["--quant-noise-pq", "0.1", "--quant-noise-pq-block-size", "4"],
}


def parse(arch: str, *flags: str):
    """Parse as fairseq-train does; the architecture function runs."""
    arguments = ["", "--task", "masked_lm", "--tokens-per-sample", "32", "--arch", arch, *flags]
    return options.parse_args_and_arch(options.get_training_parser(), arguments)


def build(arch: str, *flags: str, seed: int = 1, vocabulary: int = 40):
    """Build a model as fairseq-train does, in evaluation mode; of the task only the dictionary is needed."""
    args = parse(arch, *flags)
    torch.manual_seed(seed)
    return build_model(args, SimpleNamespace(source_dictionary=build_dictionary(vocabulary))).eval()


def layers_of(model):
    return model.encoder.sentence_encoder.layers


def random_tokens(sentences: int = 3, length: int = 9) -> torch.Tensor:
    """Return <s> … </s>, the first sentence padded on the right."""
    tokens = torch.randint(4, 40, (sentences, length), generator=torch.Generator().manual_seed(0))
    tokens[:, 0], tokens[:, -1] = 0, 2
    tokens[0, -3:] = torch.tensor([2, 1, 1])
    return tokens


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- 1. nothing shared and nothing factorised is upstream ---


@pytest.mark.parametrize("name", VARIANTS)
def test_strategy_none_is_upstream(name):
    """With E = H, RoBERTa's epsilon and RoBERTa's GELU nothing differs, not even the random numbers used.

    On purpose different by default: E = 128 and its projection, epsilon 1e-12, the tanh form of GELU, 512 positions
    unless blocks are longer (upstream: as many as --tokens-per-sample).
    """
    ours = build("albert_encoder", *LAYERS, *AS_ROBERTA, *VARIANTS[name], "--encoder-sharing", "none")
    theirs = build("roberta", *LAYERS, *VARIANTS[name])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    assert torch.equal(ours(random_tokens())[0], theirs(random_tokens())[0])
    for each in (ours, theirs):
        torch.manual_seed(5)
        each.register_classification_head("head", num_classes=2)
    predicted = [each(random_tokens(), classification_head_name="head")[0] for each in (ours, theirs)]
    assert torch.equal(*predicted)


# --- 2. shared means identical ---


@pytest.mark.parametrize("name", SHARED)
def test_writing_into_one_layer_is_read_in_the_other(name):
    layers = layers_of(build("albert_encoder", *TINY, *SHARED[name]))
    assert layers.sharing.shares and len({id(layer) for layer in layers}) == 4
    for index, owner in enumerate(layers.sharing.owners):
        for part in ("self_attn.q_proj", "fc1", "self_attn_layer_norm", "final_layer_norm"):
            with torch.no_grad():
                layers[index].get_submodule(part).weight.fill_(index + 5)
            assert layers[owner].get_submodule(part).weight.eq(index + 5).all()


def test_the_output_is_tied_to_the_table():
    encoder = build("albert_encoder", *TINY).encoder
    assert encoder.lm_head.weight is encoder.sentence_encoder.embed_tokens.weight
    assert encoder.lm_head.weight.shape == (40, 8)


def test_weights_start_as_robertas_do():
    """Normal, standard deviation 0.02; biases and the padding row zero; LayerNorms one and zero."""
    model = build("albert_encoder", "--encoder-layers", "2", vocabulary=1000)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1 if name.endswith("weight") else 0).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        else:
            assert abs(parameter.std().item() - 0.02) < 0.001, name
    assert model.encoder.sentence_encoder.embed_tokens.weight[1].eq(0).all()


# --- 3. the gradient is the sum over uses ---


@pytest.mark.parametrize("name", SHARED)
def test_gradient_is_the_sum_of_the_untied_gradients(name):
    model = build("albert_encoder", *TINY, *SHARED[name])
    copy = build("albert_encoder", *TINY, "--encoder-sharing", "none", seed=2)
    with torch.no_grad():
        for key, parameter in copy.named_parameters():
            parameter.copy_(model.get_parameter(key))
    for each in (model, copy):
        each(random_tokens())[0].square().mean().backward()
    owners = layers_of(model).sharing.owners
    for owner in set(owners):
        users = [index for index, its_owner in enumerate(owners) if its_owner == owner]
        for key, parameter in layers_of(model)[owner].named_parameters():
            summed = sum(layers_of(copy)[user].get_parameter(key).grad for user in users)
            assert torch.allclose(parameter.grad, summed, rtol=1e-4, atol=1e-7), key
    for key in ("weight", "projection.weight", "projection.bias"):
        ours, theirs = (each.encoder.sentence_encoder.embed_tokens.get_parameter(key).grad for each in (model, copy))
        assert ours.any() and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-7), key


# --- 4. counts ---


def attention_parameters(width: int) -> int:
    """Four biased H x H projections and a LayerNorm."""
    return 4 * (width * width + width) + 2 * width


def ffn_parameters(width: int, ffn: int) -> int:
    """Two biased matrices and a LayerNorm."""
    return 2 * width * ffn + ffn + width + 2 * width


def published(vocabulary: int, width: int, ffn: int, embed: int, attentions: int, ffns: int) -> int:
    """ALBERT as published: V, 512 position and 2 segment rows, LayerNorm(E), E -> H, layers, pooler; no MLM head."""
    projection = embed * width + width if embed != width else 0
    layers = attentions * attention_parameters(width) + ffns * ffn_parameters(width, ffn)
    return (vocabulary + 512 + 2) * embed + 2 * embed + projection + layers + width * width + width


def ours(vocabulary: int, width: int, embed: int, published_count: int) -> int:
    """From the published count to fairseq's model.

    Without are the pooler (fairseq: the classification head's dense layer) and two segment rows. More are
    padding_idx + 1 = 2 rows of positions, and the MLM head: dense H -> E, LayerNorm(E), a bias for each symbol.
    """
    head = width * embed + embed + 2 * embed + vocabulary
    return published_count - (width * width + width) - 2 * embed + 2 * embed + head


def count_without_memory(*flags) -> int:
    with FakeTensorMode():
        return count(build(*flags, vocabulary=30_000))


@pytest.mark.parametrize(
    ("size", "sizes", "exact"),
    [
        ("_base", (12, 768, 3072), 11_683_584),
        ("_large", (24, 1024, 4096), 17_683_968),
        ("_xlarge", (24, 2048, 8192), 58_724_864),
        ("_xxlarge", (12, 4096, 16384), 222_595_584),
    ],
)
def test_sizes_have_the_published_counts(size, sizes, exact):
    layers, width, ffn = sizes
    assert published(30_000, width, ffn, 128, 1, 1) == exact
    assert count_without_memory(f"albert_encoder{size}") == ours(30_000, width, 128, exact)
    args = parse(f"albert_encoder{size}")
    assert (args.encoder_layers, args.encoder_unique_layers, args.factorized_embed_dim) == (layers, 1, 128)


@pytest.mark.parametrize(
    ("embed", "what", "exact"),
    [
        (768, "all", 31_114_752),
        (768, "attention", 83_078_400),
        (768, "ffn", 57_117_696),
        (768, "nothing", 109_081_344),
        (128, "all", 11_683_584),
        (128, "attention", 63_647_232),
        (128, "ffn", 37_686_528),
        (128, "nothing", 89_650_176),
    ],
)
def test_the_sharing_table(embed, what, exact):
    attentions = 1 if what in ("all", "attention") else 12
    ffns = 1 if what in ("all", "ffn") else 12
    assert published(30_000, 768, 3072, embed, attentions, ffns) == exact
    flags = {"all": [], "nothing": ["--encoder-sharing", "none"]}.get(what, ["--sharing-parts", what])
    counted = count_without_memory("albert_encoder_base", "--factorized-embed-dim", str(embed), *flags)
    assert counted == ours(30_000, 768, embed, exact)


@pytest.mark.parametrize("parts", ["attention", "ffn", "norm", "attention,ffn", "attention,norm", "ffn,norm"])
def test_parts_by_count(parts):
    """With one part its LayerNorms go with it; with several, LayerNorms are shared by ``norm`` only."""
    saved = count(build("albert_encoder", *TINY, "--encoder-sharing", "none")) - count(
        build("albert_encoder", *TINY, "--sharing-parts", parts)
    )
    norm = 2 * 16
    attention, ffn = attention_parameters(16) - norm, ffn_parameters(16, 32) - norm
    expected = {
        "attention": attention + norm,
        "ffn": ffn + norm,
        "norm": 2 * norm,
        "attention,ffn": attention + ffn,
        "attention,norm": attention + 2 * norm,
        "ffn,norm": ffn + 2 * norm,
    }[parts]
    assert saved == 3 * expected


def test_every_size_is_registered():
    assert set(SIZES) == {"", "_base", "_large", "_xlarge", "_xxlarge"}
    for size in SIZES:
        assert issubclass(ARCH_MODEL_REGISTRY[f"albert_encoder{size}"], RobertaModel)


# --- widths, epsilon, positions ---


@pytest.mark.parametrize(
    ("name", "embed"),
    # The blocks of upstream's quantiser must divide E.
    [(name, embed) for name in VARIANTS for embed in (1, 8, 16, 24) if name != "product quantisation" or embed > 1],
)
def test_embeddings_of_any_width(name, embed):
    """E below, at and above H: one training step, with ties and shapes left as they were."""
    alone = ["--encoder-sharing", "none"] if name == "product quantisation" else []  # refused with sharing
    flags = ["--factorized-embed-dim", str(embed), *VARIANTS[name], *alone]
    model = build("albert_encoder", *LAYERS, *flags).train()
    sentence_encoder = model.encoder.sentence_encoder
    assert sentence_encoder.embed_positions.weight.shape == (40 + 1 + 1, embed)
    assert sentence_encoder.layernorm_embedding.normalized_shape == (embed,)
    assert (sentence_encoder.embed_tokens.projection is None) == (embed == 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits, extra = model(random_tokens(), return_all_hiddens=True)
    assert logits.shape == (3, 9, 40) and extra["inner_states"][0].shape == (9, 3, 16)
    logits.logsumexp(-1).mean().backward()
    optimizer.step()
    for index, owner in enumerate(layers_of(model).sharing.owners):
        assert layers_of(model)[index].fc1.weight is layers_of(model)[owner].fc1.weight


def test_epsilon_reaches_every_layernorm():
    for flags, epsilon in (([], 1e-12), (["--layernorm-eps", "1e-6", "--encoder-normalize-before"], 1e-6)):
        model = build("albert_encoder", *TINY, *flags)
        norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
        assert len(norms) == 1 + 2 * 4 + 1 + len(flags) // 3
        assert {norm.eps for norm in norms} == {epsilon}


@pytest.mark.parametrize("name", ["gelu_accurate", "gelu_fast", "gelu"])
def test_the_activation_is_fairseqs_by_another_kernel(name):
    """Layers and head, values and gradients; one that is not ALBERT's stays as it is."""
    model = build("albert_encoder", *TINY, "--activation-fn", name)
    functions = {module.activation_fn for module in model.modules() if hasattr(module, "activation_fn")}
    theirs = get_activation_fn(name)
    (ours,) = functions
    assert (ours is theirs) == (name == "gelu")
    values = torch.linspace(-6, 6, 241, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(ours(values).sum(), values)
    (expected,) = torch.autograd.grad(theirs(values).sum(), values)
    torch.testing.assert_close(ours(values), theirs(values))
    torch.testing.assert_close(gradient, expected)


def test_positions_follow_longer_blocks():
    assert parse("albert_encoder").max_positions == 512
    assert parse("albert_encoder", "--tokens-per-sample", "1024").max_positions == 1024


def test_an_embedding_without_second_factor_is_torchs():
    embedding = FactorizedEmbedding(10, 4, 4, padding_idx=1)
    assert list(embedding.state_dict()) == ["weight"]
    rows = embedding(torch.tensor([3]))
    assert embedding.project(rows) is rows
    with pytest.raises(ValueError, match="needs E of at least 1, not 0"):
        FactorizedEmbedding(10, 0, 4)


# --- 6. checkpoints ---


@pytest.mark.parametrize("name", SHARED)
def test_checkpoints_keep_ties_and_refuse_another_sharing(name):
    model, other = (build("albert_encoder", *TINY, *SHARED[name], seed=seed) for seed in (1, 2))
    state = model.state_dict()
    layers = [key for key in state if ".layers." in key]
    assert len({state[key].data_ptr() for key in layers}) == len(layers)
    assert f"encoder.sentence_encoder.layers.{RECORD}" in state
    other.load_state_dict(state)
    for index, owner in enumerate(layers_of(other).sharing.owners):
        assert layers_of(other)[index].fc1.weight is layers_of(other)[owner].fc1.weight
    assert torch.equal(model(random_tokens())[0], other(random_tokens())[0])
    for flags in (["--encoder-assignment", "0,1,1,2"], ["--encoder-sharing", "none"]):
        with pytest.raises(ValueError, match="sentence_encoder.layers were saved shared as"):
            build("albert_encoder", *TINY, *flags).load_state_dict(state)


def test_classification_heads_are_dropped_or_taken():
    """As upstream: fine-tuning drops heads that it did not register, the hub takes them."""
    trained = build("albert_encoder", *TINY)
    trained.register_classification_head("mood", num_classes=3)
    stranger = build("albert_encoder", *TINY, seed=2)
    stranger.load_state_dict(trained.state_dict())
    assert not stranger.classification_heads
    hub = build("albert_encoder", *TINY, "--load-checkpoint-heads", seed=3)
    hub.load_state_dict(trained.state_dict())
    interface = RobertaHubInterface(SimpleNamespace(bpe=None), None, hub.eval())
    predicted = interface.predict("mood", random_tokens())
    assert predicted.shape == (3, 3) and torch.allclose(predicted.exp().sum(1), torch.ones(3))
    expected = trained.eval()(random_tokens(), classification_head_name="mood")[0].log_softmax(-1)
    assert torch.equal(predicted, expected)


def test_a_head_learns_through_shared_layers():
    """Labels that only the encoder can tell apart, since <s> is the same in every sentence."""
    model = build("albert_encoder", *TINY, "--dropout", "0", "--attention-dropout", "0").train()
    model.register_classification_head("mood", num_classes=2)
    tokens, labels = random_tokens(sentences=6), torch.tensor([0, 1, 1, 0, 1, 0])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        loss = torch.nn.functional.cross_entropy(model(tokens, classification_head_name="mood")[0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


# --- flags ---


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--factorized-embed-dim", "0"], "--factorized-embed-dim 0 must be at least 1"),
        (["--layernorm-eps", "0"], "--layernorm-eps 0.0 must be greater than 0"),
        (
            ["--encoder-attention-heads", "7"],
            "--encoder-embed-dim 768 must be a multiple of --encoder-attention-heads 7",
        ),
        (["--encoder-unique-layers", "13"], "--encoder-unique-layers 13 must be between 1 and --encoder-layers 12"),
        (["--encoder-unique-layers", "0"], "--encoder-unique-layers 0 must be between 1 and --encoder-layers 12"),
        (["--encoder-layers", "3", "--encoder-assignment", "0,2,2"], "names parameter set 2 but leaves out 1"),
        (["--sharing-parts", "ears"], "--sharing-parts ears: 'ears' is none of attention, ffn, norm"),
        (["--encoder-layers-to-keep", "0,1"], "--encoder-layers-to-keep 0,1 cannot prune layers"),
        (["--quant-noise-scalar", "0.1"], "--quant-noise-scalar 0.1 would quantise only the first layer"),
        (["--max-positions", "31"], "--tokens-per-sample 32 does not fit into --max-positions 31"),
    ],
)
def test_contradictions_are_refused_while_parsing(flags, sentence, caplog):
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        parse("albert_encoder", *flags)
    assert str(caught.value) in caplog.messages


@pytest.mark.parametrize("size", SIZES)
def test_yaml_gets_the_preset_of_its_architecture(size):
    """fairseq-hydra-train gives a DictConfig that holds only what was written."""
    written = {"_name": f"albert_encoder{size}", "encoder_unique_layers": 3, "sharing_parts": "ffn"}
    with FakeTensorMode():
        model = build_model(OmegaConf.create(written), SimpleNamespace(source_dictionary=build_dictionary()))
    layers, width, _, heads = SIZES[size]
    assert len(layers_of(model)) == layers and layers_of(model)[0].self_attn.num_heads == heads
    assert model.encoder.lm_head.dense.weight.shape == (128, width)
    assert str(layers_of(model).sharing).endswith("(ffn only)") and len(set(layers_of(model).sharing.assignment)) == 3


# --- Hugging Face's ALBERT, random weights carried over ---


def huggingface_twin(model, groups: int):
    """Return Hugging Face's AlbertForMaskedLM with the model's weights; its segment rows become zero."""
    transformers = pytest.importorskip("transformers")
    args, encoder = model.args, model.encoder
    table = encoder.sentence_encoder.embed_tokens
    config = transformers.AlbertConfig(
        vocab_size=len(table.weight),
        embedding_size=args.factorized_embed_dim,
        hidden_size=args.encoder_embed_dim,
        num_hidden_layers=args.encoder_layers,
        num_hidden_groups=groups,
        num_attention_heads=args.encoder_attention_heads,
        intermediate_size=args.encoder_ffn_embed_dim,
        max_position_embeddings=args.max_positions,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    twin = transformers.AlbertForMaskedLM(config).eval()
    albert = twin.albert
    layers = encoder.sentence_encoder.layers
    pairs = [
        (albert.embeddings.LayerNorm, encoder.sentence_encoder.layernorm_embedding),
        (twin.predictions.dense, encoder.lm_head.dense),
        (twin.predictions.LayerNorm, encoder.lm_head.layer_norm),
    ]
    if table.projection is not None:
        pairs.append((albert.encoder.embedding_hidden_mapping_in, table.projection))
    for group, owner in enumerate(dict.fromkeys(layers.sharing.owners)):
        theirs, ours = albert.encoder.albert_layer_groups[group].albert_layers[0], layers[owner]
        pairs += [
            (theirs.attention.query, ours.self_attn.q_proj),
            (theirs.attention.key, ours.self_attn.k_proj),
            (theirs.attention.value, ours.self_attn.v_proj),
            (theirs.attention.dense, ours.self_attn.out_proj),
            (theirs.attention.LayerNorm, ours.self_attn_layer_norm),
            (theirs.ffn, ours.fc1),
            (theirs.ffn_output, ours.fc2),
            (theirs.full_layer_layer_norm, ours.final_layer_norm),
        ]
    with torch.no_grad():
        for theirs, ours in pairs:
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
        if table.projection is None:  # Hugging Face has a square layer there: make it do nothing
            torch.nn.init.eye_(albert.encoder.embedding_hidden_mapping_in.weight)
            albert.encoder.embedding_hidden_mapping_in.bias.zero_()
        albert.embeddings.word_embeddings.weight.copy_(table.weight)
        # fairseq's first position is padding_idx + 1.
        albert.embeddings.position_embeddings.weight.copy_(encoder.sentence_encoder.embed_positions.weight[2:])
        albert.embeddings.token_type_embeddings.weight.zero_()
        twin.predictions.bias.copy_(encoder.lm_head.bias)
        twin.predictions.decoder.bias = twin.predictions.bias
    assert twin.predictions.decoder.weight is albert.embeddings.word_embeddings.weight
    return twin


def randomise(model) -> None:
    """Give every parameter, biases and LayerNorms too, numbers large enough to tell models apart."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.3 * noise)
        model.encoder.sentence_encoder.embed_tokens.weight[1] = 0


@pytest.mark.parametrize("embed", [8, 16, 24])
@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ([], 1),
        (["--encoder-unique-layers", "2"], 2),
        (["--encoder-unique-layers", "3"], 3),
        (["--encoder-unique-layers", "6"], 6),
        (["--encoder-sharing", "none"], 6),
    ],
)
def test_hugging_faces_albert_computes_the_same(embed, flags, groups):
    model = build("albert_encoder", *LAYERS, "--encoder-layers", "6", "--factorized-embed-dim", str(embed), *flags)
    randomise(model)
    twin = huggingface_twin(model, groups)
    tokens = random_tokens()
    real = tokens.ne(1)
    with torch.no_grad():
        logits, extra = model(tokens, return_all_hiddens=True)
        theirs = twin(
            input_ids=tokens,
            attention_mask=real.long(),
            token_type_ids=torch.zeros_like(tokens),
            output_hidden_states=True,
        )
        features = twin.albert(input_ids=tokens, attention_mask=real.long()).last_hidden_state
    assert len(extra["inner_states"]) == len(theirs.hidden_states) == 7
    for ours, state in zip(extra["inner_states"], theirs.hidden_states, strict=True):
        assert ours.std() > 0.1 and (ours.transpose(0, 1) - state)[real].abs().max() < 1e-4
    assert (model(tokens, features_only=True)[0] - features)[real].abs().max() < 1e-4
    assert logits.std() > 0.1 and (logits - theirs.logits)[real].abs().max() < 1e-4


def test_the_twin_notices_another_activation_and_epsilon():
    """The comparison is sharp enough to tell ALBERT's GELU and epsilon from RoBERTa's."""
    for wrong in (["--activation-fn", "relu"], ["--layernorm-eps", "1e-3"]):
        model = build("albert_encoder", *TINY, *wrong)
        randomise(model)
        twin = huggingface_twin(model, 1)
        tokens = random_tokens()[1:]
        with torch.no_grad():
            assert (model(tokens)[0] - twin(input_ids=tokens).logits).abs().max() > 1e-3


# --- fairseq's commands on real text ---


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Real English, in pieces and binarised: running text for pretraining, film reviews with labels for fine-tuning."""
    folder = tmp_path_factory.mktemp("text")
    script = [sys.executable, REPOSITORY / "examples" / "masked_lm" / "prepare.py"]
    arguments = ["--out", folder, "--vocabulary", "400", "--most-lines", "500", "--review-copies", "1"]
    subprocess.run([*script, *arguments], check=True, capture_output=True)
    for before, after, destination in (
        ("", "text", "bin"),
        ("reviews.", "input0", "reviews/input0"),
        ("reviews.", "label", "reviews/label"),
    ):
        dictionary = ["--srcdict", folder / "bin" / "dict.txt"] if after == "input0" else []
        valid = f"{folder}/{before}valid.{after}" + (f",{folder}/valid1.text" if after == "text" else "")
        prefixes = ["--trainpref", folder / f"{before}train.{after}", "--validpref", valid]
        run(["fairseq-preprocess", "--only-source", *prefixes, "--destdir", folder / destination, *dictionary])
    return folder


def train_encoder(data, save, *flags) -> str:
    """Run fairseq-train with a small encoder: four layers from two groups."""
    return run(
        [
            *("fairseq-train", data, "--user-dir", PLUGIN, "--arch", "albert_encoder", "--cpu", "--save-dir", save),
            *("--encoder-embed-dim", 64, "--encoder-ffn-embed-dim", 128, "--encoder-attention-heads", 4),
            *("--encoder-layers", 4, "--encoder-unique-layers", 2, "--factorized-embed-dim", 32),
            *("--optimizer", "adam", "--lr", "2e-3", "--lr-scheduler", "fixed", "--no-progress-bar"),
            *("--num-workers", 0, "--required-batch-size-multiple", 1, *flags),
        ]
    )


def validation(output: str, what: str) -> list[float]:
    """Return what was printed after each validation."""
    return [float(value) for value in re.findall(rf"valid on 'valid' subset.* \| {what} ([\d.]+)", output)]


CLASSIFY = [
    *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--init-token", 0),
    *("--num-classes", 2, "--classification-head-name", "sentence_classification_head", "--max-sentences", 20),
]


def test_both_tasks_read_a_sentence_alike(text):
    """Same numbers for the same pieces, <s> first and </s> last, <mask> in the same row."""
    flags = {
        "masked_lm": [text / "bin", "--sample-break-mode", "eos", "--tokens-per-sample", 512, "--skip-masking"],
        "sentence_prediction": [text / "reviews", "--criterion", "sentence_prediction", *CLASSIFY[4:]],
    }
    tasks = {}
    for name, arguments in flags.items():
        words = ["--task", name, "--arch", "albert_encoder", *arguments]
        args = options.parse_args_and_arch(options.get_training_parser(), [str(word) for word in words])
        tasks[name] = setup_task(args)
        tasks[name].load_dataset("valid1" if name == "masked_lm" else "valid")
    pretraining, tuning = tasks.values()
    assert pretraining.source_dictionary == tuning.source_dictionary
    assert pretraining.mask_idx == tuning.source_dictionary.index("<mask>") != tuning.source_dictionary.unk()
    read = [
        {item["id"]: item["net_input.src_tokens"].tolist() for item in map(data.__getitem__, range(len(data)))}
        for data in (pretraining.datasets["valid1"], tuning.datasets["valid"])
    ]
    whole = [number for number, tokens in read[1].items() if len(tokens) <= 128]  # others are cut for pretraining
    assert len(whole) > 400 and all(read[0][number] == read[1][number] for number in whole)
    assert all(tokens[0] == 0 and tokens[-1] == 2 and tokens.count(2) == 1 for tokens in read[0].values())


def test_finetuning_starts_from_every_pretrained_weight(text, tmp_path):
    """With a learning rate of zero, all but the new head is what the checkpoint held, whichever flag names it."""
    masked_lm = ["--task", "masked_lm", "--sample-break-mode", "eos", "--tokens-per-sample", 512, "--max-tokens", 2000]
    one = ["--max-update", 1, "--disable-validation"]
    train_encoder(text / "bin", tmp_path / "mlm", *masked_lm, "--criterion", "masked_lm", *one, "--seed", 7)
    pretrained = tmp_path / "mlm" / "checkpoint_last.pt"
    before = torch.load(pretrained, weights_only=True)["model"]
    for restore in (["--finetune-from-model"], ["--reset-optimizer", "--restore-file"]):
        save = tmp_path / restore[-1]
        output = train_encoder(text / "reviews", save, *CLASSIFY, *one, "--lr", 0, *restore, pretrained)
        assert f"Loaded checkpoint {pretrained}" in output
        after = torch.load(save / "checkpoint_last.pt", weights_only=True)["model"]
        new = set(after) - set(before)
        assert not set(before) - set(after) and new and all("classification_heads." in name for name in new)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_pretrain_resume_finetune_and_use(text, tmp_path, capsys):
    masked_lm = [
        *("--task", "masked_lm", "--criterion", "masked_lm", "--sample-break-mode", "eos"),
        *("--tokens-per-sample", 512, "--max-tokens", 2000, "--dropout", 0, "--warmup-updates", 10),
        "--ignore-unused-valid-subsets",
    ]
    output = train_encoder(text / "bin", tmp_path / "mlm", *masked_lm, "--max-epoch", 1)
    assert output.count("encoder: 4 layers from 2 parameter sets (sequence): 0 0 1 1;") == 1
    resumed = train_encoder(text / "bin", tmp_path / "mlm", *masked_lm, "--max-epoch", 3)
    assert "Loaded checkpoint" in resumed and "(epoch 2 @" in resumed
    losses = [*validation(output, "loss"), *validation(resumed, "loss")]
    symbols = len((text / "bin" / "dict.txt").read_text("utf-8").splitlines()) + 5  # with fairseq's four and <mask>
    assert len(losses) == 3 and sorted(losses, reverse=True) == losses and losses[-1] < math.log2(symbols)
    expected = (
        (symbols + 514 + 2) * 32  # rows of symbols and positions, LayerNorm
        + (32 * 64 + 64)
        + 2 * (attention_parameters(64) + ffn_parameters(64, 128))
        + (64 * 32 + 32 + 2 * 32 + symbols)
    )
    assert f"num. shared model params: {expected:,}" in output
    pretrained = tmp_path / "mlm" / "checkpoint_last.pt"

    hub = AlbertEncoderModel.from_pretrained(
        *(str(tmp_path / "mlm"), "checkpoint_last.pt", str(text / "bin")),
        bpe="sentencepiece",
        sentencepiece_model=str(text / "spm.model"),
    ).eval()
    tokens = hub.encode("the film is dull.")
    features = hub.extract_features(tokens)
    states = hub.extract_features(tokens, return_all_hiddens=True)
    assert features.shape == (1, len(tokens), 64) and len(states) == 5
    assert torch.equal(states[-1], features)
    filled = hub.fill_mask("the film is a <mask> comedy.", topk=10)  # which leaves out <s> and </s>
    chances = [chance for _, chance, _ in filled]
    assert 8 <= len(filled) <= 10 and chances == sorted(chances, reverse=True)
    assert all(sentence.startswith("the film is a") for sentence, _, _ in filled)

    classify = [
        *(
            *CLASSIFY,
            "--reset-optimizer",
            "--reset-dataloader",
            "--reset-meters",
            "--best-checkpoint-metric",
            "accuracy",
        ),
        *("--maximize-best-checkpoint-metric", "--max-epoch", 2),
    ]
    tuned = train_encoder(text / "reviews", tmp_path / "tuned", *classify, "--restore-file", pretrained)
    assert f"Loaded checkpoint {pretrained}" in tuned and "0 0 1 1;" in tuned
    classifier = AlbertEncoderModel.from_pretrained(
        *(str(tmp_path / "tuned"), "checkpoint_last.pt", str(text / "reviews")),
        bpe="sentencepiece",
        sentencepiece_model=str(text / "spm.model"),
    ).eval()
    dictionary, classes = classifier.task.source_dictionary, classifier.task.label_dictionary
    right, labels = 0, (text / "reviews.valid.label").read_text("utf-8").split()
    for pieces, label in zip((text / "reviews.valid.input0").read_text("utf-8").splitlines(), labels, strict=True):
        tokens = dictionary.encode_line(f"<s> {pieces}", add_if_not_exist=False).long()
        guess = classifier.predict("sentence_classification_head", tokens).argmax() + classes.nspecial
        right += classes[int(guess)] == label
    assert abs(100 * right / len(labels) - validation(tuned, "accuracy")[-1]) < 0.1  # as fairseq counted them

    assert main(["show", "--path", str(pretrained)]) == 0
    shown = capsys.readouterr().out
    assert "set   0 0 1 1" in shown and f"V={symbols}" in shown and f"{expected:,}" in shown
    assert "classification" not in shown
    before = {re.split("  +", line)[0]: line.split()[-3:-1] for line in shown.splitlines()}
    assert main(["show", "--path", str(tmp_path / "tuned" / "checkpoint_last.pt")]) == 0
    rows = {re.split("  +", line)[0]: line.split()[-3:] for line in capsys.readouterr().out.splitlines()}
    head = (64 * 64 + 64) + (64 * 2 + 2)  # dense H -> H, then H -> two classes
    assert rows["total"][0] == f"{expected + head:,}"
    numbers = [[int(number.replace(",", "")) for number in row["head"][:2]] for row in (before, rows)]
    assert [after - number for number, after in zip(*numbers, strict=True)] == [head, head]

    with pytest.raises(ValueError, match=r"encoder.sentence_encoder.layers were saved shared as 0 0 1 1"):
        load_model_ensemble_and_task(
            [str(pretrained)], arg_overrides={"encoder_unique_layers": 4, "data": str(text / "bin")}
        )
