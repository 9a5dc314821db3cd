"""The invariants of shared speech-to-text models, and what fairseq's options do to them."""

from types import SimpleNamespace

import pytest
import test_transformer_shared as translation
import torch
from conftest import build_dictionary, parse
from fairseq.criterions.label_smoothed_cross_entropy_with_ctc import (
    LabelSmoothedCrossEntropyWithCtcCriterion,
)
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.models.speech_to_text import S2TTransformerModel
from fairseq.sequence_generator import SequenceGenerator

from fairseq_sharing.arguments import get_sharing
from fairseq_sharing.checkpoint import RECORD
from fairseq_sharing.models.s2t_transformer_shared import PRESETS, SIZES
from fairseq_sharing.shared_model import share_stack

BINS = 8
REV = "s2t_transformer_shared_cycle_rev"
TINY = [
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32", "--conv-channels", "12"),
    *("--encoder-attention-heads", "2", "--decoder-attention-heads", "2"),
]
DEPTH = ["--encoder-layers", "6", "--decoder-layers", "4"]
SETS = ["--encoder-unique-layers", "3", "--decoder-unique-layers", "2"]
UNSHARED = ["--encoder-sharing", "none", "--decoder-sharing", "none"]
CTC = ["--criterion", "label_smoothed_cross_entropy_with_ctc", "--ctc-weight", "0.3"]
ARCHS = [
    *((f"s2t_transformer_shared_{preset}", SETS) for preset in ("sequence", "cycle", "cycle_rev")),
    ("s2t_transformer_shared_universal", []),
    ("s2t_transformer_shared_sequence_librispeech", SETS),
]
VARIANTS = {
    "plain": [],
    "embeddings tied": ["--share-decoder-input-output-embed"],
    "CTC": CTC,
    "convtransformer": ["--conv-version", "convtransformer", "--conv-out-channels", "4"],
    "layernorm-embedding": ["--layernorm-embedding"],
    "no scale": ["--no-scale-embedding"],
    "decoder wider": ["--decoder-embed-dim", "24", "--decoder-ffn-embed-dim", "20"],
    "frozen encoder": ["--encoder-freezing-updates", "10"],
    "one convolution": ["--conv-kernel-sizes", "3"],
}


def configure(arch: str, *flags: str):
    args = parse(arch, "--task", "speech_to_text", *flags)
    args.input_feat_per_channel = BINS  # as the task does
    return args


def build(arch: str, *flags: str, seed: int = 1):
    """Build a small model in evaluation mode: 6 encoder layers and 4 decoder layers."""
    args = configure(arch, *TINY, *DEPTH, *flags)
    torch.manual_seed(seed)
    return build_model(args, SimpleNamespace(target_dictionary=build_dictionary())).eval()


def random_batch(sentences: int = 3, frames: int = 30, length: int = 7) -> dict:
    """Return features and targets of different lengths, the longest clip first, as fairseq sorts them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([frames - 7 * number for number in range(sentences)]).clamp(min=9)
    source = torch.randn(sentences, frames, BINS, generator=generator)
    target = torch.randint(4, 40, (sentences, length), generator=generator)
    target[:, 0] = 2
    source[torch.arange(frames)[None] >= lengths[:, None]] = 0
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}


def normalised(model, output):
    return model.get_normalized_probs(output, log_probs=True)


def stacks(model) -> dict:
    return {"encoder": model.encoder.transformer_layers, "decoder": model.decoder.layers}


# --- 1. nothing shared is upstream ---


@pytest.mark.parametrize("name", VARIANTS)
def test_strategy_none_is_upstream(name):
    ours, theirs = build(REV, *VARIANTS[name], *UNSHARED), build("s2t_transformer", *VARIANTS[name])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    batch = random_batch()
    assert torch.equal(normalised(ours, ours(**batch)), normalised(theirs, theirs(**batch)))


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_upstreams(size):
    ours, theirs = configure(REV + size), configure("s2t_transformer" + size)
    depth = {"encoder_layers", "decoder_layers"}
    different = {key for key, value in vars(theirs).items() if getattr(ours, key) != value} - {"arch"}
    assert different == depth


# --- 2. shared means identical ---


@pytest.mark.parametrize(("arch", "flags"), ARCHS)
def test_writing_into_one_layer_is_read_in_the_other(arch, flags):
    model = build(arch, *flags)
    for layers in stacks(model).values():
        assert len({id(layer) for layer in layers}) == len(layers)
        for index, owner in enumerate(layers.sharing.owners):
            assert layers[index].self_attn.q_proj.weight is layers[owner].self_attn.q_proj.weight
            with torch.no_grad():
                layers[index].fc1.weight.fill_(index + 5)
            assert layers[owner].fc1.weight.eq(index + 5).all()


def test_each_stack_has_its_own_n_m_and_strategy():
    model = build(REV, "--encoder-unique-layers", "3", "--decoder-assignment", "0,1,1,2", "--encoder-sharing", "cycle")
    assert {stack: str(layers.sharing) for stack, layers in stacks(model).items()} == {
        "encoder": "0 1 2 0 1 2",
        "decoder": "0 1 1 2",
    }


def test_a_helper_that_finds_nothing_to_tie_raises():
    with pytest.raises(ValueError, match="there are no layers to share in this stack as 0 1 2 2 1 0"):
        share_stack(torch.nn.ModuleList(), configure(REV, *TINY, *DEPTH, *SETS), "encoder")


# --- 3. the gradient is the sum over uses ---


@pytest.mark.parametrize(("arch", "flags"), ARCHS)
def test_gradient_is_the_sum_of_the_untied_gradients(arch, flags):
    model, copy = build(arch, *flags), build(arch, *UNSHARED)
    every = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    copy.load_state_dict({**copy.state_dict(), **every})
    batch = random_batch()
    for each in (model, copy):
        normalised(each, each(**batch)).square().mean().backward()
    for stack, layers in stacks(model).items():
        plain, owners = stacks(copy)[stack], layers.sharing.owners
        for owner in set(owners):
            users = [index for index, its_owner in enumerate(owners) if its_owner == owner]
            assert len(users) > 1
            for name, parameter in layers[owner].named_parameters():
                summed = sum(dict(plain[user].named_parameters())[name].grad for user in users)
                assert torch.allclose(parameter.grad, summed, rtol=1e-4, atol=1e-7), name


# --- 4. counts ---


def layer_parameters(width: int, ffn: int, attentions: int) -> int:
    """Attention: four biased d x d projections and a LayerNorm each; FFN: two biased matrices and a LayerNorm."""
    return attentions * (4 * (width * width + width) + 2 * width) + 2 * width * ffn + ffn + width + 2 * width


def model_parameters(vocabulary: int, width: int, ffn: int, sets: tuple[int, int], embeddings: int) -> int:
    """Two gated convolutions of kernel 5 (80 -> 1024, halved by the gate, 512 -> 2d), Pre-LN with a last LayerNorm in
    each stack, sinusoidal positions, M sets in each stack, one embedding or two.
    """
    convolutions = 80 * 1024 * 5 + 1024 + 512 * 2 * width * 5 + 2 * width
    encoder = sets[0] * layer_parameters(width, ffn, 1) + 2 * width
    decoder = sets[1] * layer_parameters(width, ffn, 2) + 2 * width
    return convolutions + encoder + decoder + embeddings * vocabulary * width


def count_on_meta(arch: str, *flags: str, vocabulary: int = 10000) -> int:
    args = configure(arch, *flags)
    args.input_feat_per_channel = 80
    with torch.device("meta"):
        model = build_model(args, SimpleNamespace(target_dictionary=build_dictionary(vocabulary)))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("preset", ["sequence", "cycle", "cycle_rev"])
def test_librispeech_has_the_published_count(preset):
    arch = f"s2t_transformer_shared_{preset}_librispeech"
    assert count_on_meta(arch) == model_parameters(10000, 512, 2048, (8, 4), embeddings=1) == 50_190_336
    args = configure(arch)
    assert (args.encoder_layers, args.encoder_unique_layers) == (16, 8)
    assert (args.decoder_layers, args.decoder_unique_layers) == (8, 4)
    assert args.encoder_normalize_before and args.decoder_normalize_before
    deeper = ["--encoder-layers", "24", "--decoder-layers", "12"]
    assert count_on_meta(arch, *deeper) == 50_190_336


@pytest.mark.parametrize(
    ("size", "width", "ffn"), [("", 512, 2048), ("_s", 256, 2048), ("_m", 512, 2048), ("_l", 1024, 4096)]
)
def test_counts_of_the_sizes(size, width, ffn):
    expected = model_parameters(1000, width, ffn, (8, 4), embeddings=2)
    for preset in ("sequence", "cycle", "cycle_rev"):
        assert count_on_meta(f"s2t_transformer_shared_{preset}{size}", vocabulary=1000) == expected
    universal = model_parameters(1000, 2 * width, 2 * ffn, (1, 1), embeddings=2)
    assert count_on_meta(f"s2t_transformer_shared_universal{size}", vocabulary=1000) == universal


def test_every_preset_and_size_is_registered():
    names = {f"s2t_transformer_shared_{preset}{size}" for preset in PRESETS for size in SIZES}
    names |= {f"s2t_transformer_shared_{preset}_librispeech" for preset in ("sequence", "cycle", "cycle_rev")}
    registered = {name for name in ARCH_MODEL_REGISTRY if name.startswith("s2t_transformer_shared_")}
    assert registered == names
    assert all(issubclass(ARCH_MODEL_REGISTRY[name], S2TTransformerModel) for name in names)


# --- 5. stepwise decoding equals the full forward pass ---


def assert_stepwise_equals_full(model) -> None:
    """Decode step by step, reordering each clip's beams, as translation does."""
    translation.assert_stepwise_equals_full(model, make_batch=random_batch)


@pytest.mark.parametrize(("arch", "flags"), ARCHS)
def test_stepwise_equals_full(arch, flags):
    with torch.no_grad():
        assert_stepwise_equals_full(build(arch, *flags))


@pytest.mark.parametrize("name", VARIANTS)
def test_stepwise_equals_full_in_every_variant(name):
    with torch.no_grad():
        assert_stepwise_equals_full(build(REV, *SETS, *VARIANTS[name]))


def test_one_layer_object_in_two_slots_would_be_caught():
    """The fault that N layer objects avoid: one cache for two layers."""
    model = build(REV, *SETS)
    model.decoder.layers[3] = model.decoder.layers[0]
    with torch.no_grad(), pytest.raises(AssertionError):
        assert_stepwise_equals_full(model)


@pytest.mark.parametrize("beam", [1, 4])
def test_beam_search_scores_are_those_of_a_full_forward_pass(beam):
    model = build(REV, *SETS)
    generator = SequenceGenerator([model], build_dictionary(), beam_size=beam, max_len_b=8, normalize_scores=False)
    batch = random_batch()
    found = generator.generate([model], {"net_input": {k: batch[k] for k in ("src_tokens", "src_lengths")}})
    for sentence, hypotheses in enumerate(found):
        tokens = hypotheses[0]["tokens"]
        inputs = torch.cat([tokens.new_tensor([2]), tokens[:-1]]).repeat(len(found), 1)
        with torch.no_grad():  # the whole batch: fairseq's convolutions see a little of the padding behind a clip
            scores = normalised(model, model(batch["src_tokens"], batch["src_lengths"], inputs))[sentence]
        expected = scores.gather(1, tokens[:, None]).sum()
        assert torch.allclose(hypotheses[0]["score"], expected, atol=1e-4)


# --- 6. checkpoints ---


def save(model, path) -> str:
    """Write what fairseq's component loading reads."""
    history = [{"num_updates": 1, "criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}]
    state = {"model": model.state_dict(), "cfg": None, "args": None, "optimizer_history": history}
    torch.save({**state, "extra_state": {"epoch": 1, "train_iterator": {"epoch": 1}}}, path)
    return str(path)


def test_checkpoints_hold_each_tensor_once_and_keep_the_ties():
    model, other = build(REV, *SETS), build(REV, *SETS, seed=2)
    state = model.state_dict()
    floats = [value for value in state.values() if value.is_floating_point() and value.numel() > 1]
    assert sum(value.numel() for value in floats) == sum(parameter.numel() for parameter in model.parameters())
    assert f"encoder.transformer_layers.{RECORD}" in state and f"decoder.layers.{RECORD}" in state
    other.load_state_dict(state)
    batch = random_batch()
    assert torch.equal(normalised(model, model(**batch)), normalised(other, other(**batch)))
    for layers in stacks(other).values():
        assert layers[-1].fc2.bias is layers[layers.sharing.owners[-1]].fc2.bias


@pytest.mark.parametrize("flags", [["--encoder-sharing", "cycle"], ["--encoder-unique-layers", "6"], UNSHARED[:2]])
def test_a_checkpoint_of_another_sharing_is_refused(flags):
    sets = ["--decoder-unique-layers", "2", *(["--encoder-unique-layers", "3"] if "cycle" in flags else [])]
    other = build(REV, *sets, *flags)
    with pytest.raises(ValueError, match="its encoder.transformer_layers were saved shared as 0 1 2 2 1 0"):
        other.load_state_dict(build(REV, *SETS).state_dict())


def test_upstreams_checkpoint_is_refused_where_layers_are_shared_and_loads_where_none_are():
    state = build("s2t_transformer").state_dict()
    with pytest.raises(ValueError, match="with different .* in layers 2 and 3, that is not shared so"):
        build(REV, *SETS).load_state_dict(dict(state))
    build(REV, *UNSHARED).load_state_dict(dict(state))


# --- a pretrained encoder ---


def encoder_equals(model, other) -> bool:
    theirs = dict(other.encoder.named_parameters(remove_duplicate=False))
    mine = dict(model.encoder.named_parameters(remove_duplicate=False))
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def is_tied(layers) -> bool:
    owners = enumerate(layers.sharing.owners)
    return layers.sharing.shares and all(layers[i].fc1.weight is layers[owner].fc1.weight for i, owner in owners)


def test_a_shared_encoder_is_loaded_from_a_shared_checkpoint(tmp_path):
    """The decoder may be shared in another way."""
    source = build(REV, *SETS, seed=2)
    path = save(source, tmp_path / "shared.pt")
    decoder = ["--encoder-unique-layers", "3", "--decoder-sharing", "none"]
    model = build(REV, *decoder, "--load-pretrained-encoder-from", path)
    assert encoder_equals(model, source) and is_tied(model.encoder.transformer_layers)
    assert len(model.encoder.state_dict()) == len(source.encoder.state_dict())


def test_a_shared_encoder_is_loaded_from_a_full_checkpoint(tmp_path):
    """A file with every copy of a shared layer is welcome when the copies agree, and refused when they do not."""
    source, full = build(REV, *SETS, seed=2), build("s2t_transformer", seed=3)
    different = save(full, tmp_path / "different.pt")
    every = {name: value.detach() for name, value in source.named_parameters(remove_duplicate=False)}
    full.load_state_dict({**full.state_dict(), **every})
    model = build(REV, *SETS, "--load-pretrained-encoder-from", save(full, tmp_path / "full.pt"))
    assert encoder_equals(model, source) and is_tied(model.encoder.transformer_layers)
    with pytest.raises(ValueError, match="with different .* in layers 2 and 3, that is not shared so"):
        build(REV, *SETS, "--load-pretrained-encoder-from", different)


def test_an_unshared_encoder_goes_both_ways(tmp_path):
    theirs, ours = build("s2t_transformer", seed=2), build(REV, *UNSHARED, seed=3)
    flag = "--load-pretrained-encoder-from"
    assert encoder_equals(build(REV, *UNSHARED, flag, save(theirs, tmp_path / "theirs.pt")), theirs)
    assert encoder_equals(build("s2t_transformer", flag, save(ours, tmp_path / "ours.pt")), ours)


@pytest.mark.parametrize("flags", [["--encoder-sharing", "sequence", *SETS], [*UNSHARED]])
def test_a_pretrained_encoder_of_another_sharing_is_refused(tmp_path, flags):
    path = save(build(REV, *SETS), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="its transformer_layers were saved shared as 0 1 2 2 1 0; this model shares"):
        build(REV, *flags, "--load-pretrained-encoder-from", path)


def test_a_pretrained_encoder_need_not_be_there_when_decoding(tmp_path, caplog):
    args = configure(REV, *TINY, *DEPTH, *SETS)
    args._name = REV  # as in a checkpoint
    args.load_pretrained_encoder_from = str(tmp_path / "gone.pt")
    build_model(args, SimpleNamespace(target_dictionary=build_dictionary()))
    assert "skipped pretraining because" in caplog.text


# --- upstream's options with sharing ---


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_a_step_and_stays_tied(name):
    model = build(REV, *SETS, *VARIANTS[name]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**random_batch())[0].square().mean().backward()
    if name == "frozen encoder":
        assert all(parameter.grad is None for parameter in model.encoder.parameters())
        model.set_num_updates(10)
        model(**random_batch())[0].square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.encoder.transformer_layers.parameters())
    optimizer.step()
    assert all(is_tied(layers) for layers in stacks(model).values())


def test_ctc_reaches_the_shared_encoder_only():
    model, dictionary = build(REV, *SETS, *CTC).train(), build_dictionary()
    task = SimpleNamespace(target_dictionary=dictionary, source_dictionary=None)
    criterion = LabelSmoothedCrossEntropyWithCtcCriterion(task, True, 0.0, 0, False, ctc_weight=1.0)
    batch = random_batch(length=4)
    target = torch.cat([batch["prev_output_tokens"][:, 1:], torch.full((3, 1), 2)], 1)
    sample = {"net_input": batch, "target": target, "target_lengths": torch.full((3,), 4), "ntokens": 12}
    loss, _, logging_output = criterion(model, sample)
    loss.backward()
    assert logging_output["ctc_loss"] > 0 and model.encoder.ctc_proj.weight.grad.abs().sum() > 0
    assert all(p.grad is not None for p in model.encoder.transformer_layers.parameters())


def test_training_logs_each_stack_once(caplog):
    model = build(REV, *SETS)
    with caplog.at_level("INFO", logger="fairseq_sharing.shared_model"):
        model.train()
        model.train()
    saved = {"encoder": 3 * layer_parameters(16, 32, 1), "decoder": 2 * layer_parameters(16, 32, 2)}
    assert caplog.messages == [
        f"encoder: 6 layers from 3 parameter sets (cycle_rev): 0 1 2 2 1 0; {saved['encoder']:,} parameters saved",
        f"decoder: 4 layers from 2 parameter sets (cycle_rev): 0 1 1 0; {saved['decoder']:,} parameters saved",
    ]


# --- flags ---


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--encoder-unique-layers", "17"], "--encoder-unique-layers 17 must be between 1 and --encoder-layers 16"),
        (["--decoder-unique-layers", "0"], "--decoder-unique-layers 0 must be between 1 and --decoder-layers 8"),
        (["--decoder-assignment", "0,1"], "--decoder-assignment 0,1 has 2 entries .* --decoder-layers 8"),
        (["--sharing-parts", "convolution"], "--sharing-parts convolution: 'convolution' is none of"),
        (["--encoder-attention-heads", "7"], "--encoder-embed-dim 512 must be a multiple of .*-attention-heads 7"),
        (["--decoder-attention-heads", "0"], "--decoder-embed-dim 512 must be a multiple of .*-attention-heads 0"),
        (["--conv-kernel-sizes", "5,4"], "--conv-kernel-sizes 5,4 must be odd whole numbers"),
        (["--conv-kernel-sizes", "5,x"], "--conv-kernel-sizes 5,x must be odd whole numbers"),
        (["--conv-channels", "31"], "--conv-channels 31 must be even"),
        (["--load-pretrained-encoder-from", "no.pt"], "--load-pretrained-encoder-from no.pt: there is no such file"),
        (["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded .* use --ddp-backend legacy_ddp"),
    ],
)
def test_wrong_flags_are_refused_while_parsing(flags, sentence, caplog):
    with pytest.raises(ValueError, match=sentence) as caught:
        configure(REV, *flags)
    assert str(caught.value) in caplog.messages


def test_even_kernels_would_leave_the_mask_and_the_frames_apart():
    """Why they are refused."""
    args = configure("s2t_transformer", *TINY, "--conv-kernel-sizes", "4,4")
    model = build_model(args, SimpleNamespace(target_dictionary=build_dictionary()))
    with pytest.raises(RuntimeError, match="must match"):
        model(**random_batch())


def test_parts_are_shared_in_both_stacks():
    model = build(REV, *SETS, "--sharing-parts", "ffn")
    for layers in stacks(model).values():
        assert layers[-1].fc1.weight is layers[0].fc1.weight
        assert layers[-1].self_attn.q_proj.weight is not layers[0].self_attn.q_proj.weight
    args = configure(REV, "--sharing-parts", "ffn")
    assert str(get_sharing(args, "decoder")) == "0 1 2 3 3 2 1 0 (ffn only)"
