"""The invariants of a shared model, for every translation architecture."""

import pytest
import torch
from conftest import FOUR_FROM_TWO, STRATEGY_ARCHS, TINY, TINY_ARCHS, build, build_dictionary, parse, random_batch
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask

from fairseq_sharing.models.transformer_shared import PRESETS, SIZES

REV = "transformer_shared_cycle_rev"
UNSHARED = ["--encoder-sharing", "none", "--decoder-sharing", "none"]
# Flags of upstream's Transformer that must go on working; each with sharing.
VARIANTS = {
    "post-LN": [],
    "pre-LN": ["--encoder-normalize-before", "--decoder-normalize-before"],
    "layernorm-embedding": ["--layernorm-embedding"],
    "learned positions": ["--encoder-learned-pos", "--decoder-learned-pos"],
    "no positions": ["--no-token-positional-embeddings"],
    "decoder embeddings tied": ["--share-decoder-input-output-embed"],
    "all embeddings tied": ["--share-all-embeddings"],
    "adaptive softmax": ["--adaptive-softmax-cutoff", "10,20", "--criterion", "adaptive_loss"],
    "layerdrop": ["--encoder-layerdrop", "0.3", "--decoder-layerdrop", "0.3"],
    "activation checkpointing": ["--checkpoint-activations"],
    "cross-self-attention": ["--cross-self-attention", "--no-cross-attention"],
    "attention only": ["--sharing-parts", "attention"],
    "all but norms": ["--sharing-parts", "attention,ffn"],
    "decoder wider": ["--decoder-embed-dim", "24", "--decoder-ffn-embed-dim", "20"],
    "assignment": ["--encoder-assignment", "0,1,0,0", "--decoder-assignment", "1,0,0,1"],
}


def variant(name: str):
    flags = [*TINY, *FOUR_FROM_TWO, *VARIANTS[name]]
    if name == "assignment":
        flags = [*TINY, "--encoder-layers", "4", "--decoder-layers", "4", *VARIANTS[name]]
    return build(REV, *flags)


def normalised(model, output):
    return model.get_normalized_probs(output, log_probs=True)


# --- 1. nothing shared is upstream ---


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if name not in ("attention only", "all but norms", "assignment")]
)
def test_strategy_none_is_upstream(name):
    flags = [*TINY, "--encoder-layers", "3", "--decoder-layers", "3", *VARIANTS[name]]
    ours, theirs = build(REV, *flags, *UNSHARED), build("transformer", *flags)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    batch = random_batch()
    assert torch.equal(normalised(ours, ours(**batch)), normalised(theirs, theirs(**batch)))


def test_as_many_sets_as_layers_is_upstream():
    flags = [*TINY, "--encoder-layers", "3", "--decoder-layers", "3"]
    ours = build(REV, *flags, "--encoder-unique-layers", "3", "--decoder-unique-layers", "3")
    assert list(ours.state_dict()) == list(build("transformer", *flags).state_dict())


# --- 2. shared means identical ---


@pytest.mark.parametrize(("arch", "flags"), TINY_ARCHS)
def test_writing_into_one_layer_is_read_in_the_other(arch, flags):
    model = build(arch, *flags)
    for stack in (model.encoder, model.decoder):
        for index, owner in enumerate(stack.layers.sharing.owners):
            with torch.no_grad():
                stack.layers[index].self_attn.q_proj.weight.fill_(index + 5)
            assert stack.layers[owner].self_attn.q_proj.weight.eq(index + 5).all()
    assert len({id(layer) for layer in model.decoder.layers}) == len(model.decoder.layers)


# --- 3. the gradient is the sum over uses ---


def untied_copy(model, arch, flags):
    """Return a model without sharing that computes the same."""
    flags = [flag for flag in flags if "unique" not in flag]
    depth = {"--encoder-layers": len(model.encoder.layers), "--decoder-layers": len(model.decoder.layers)}
    plain = [*TINY, *(str(word) for item in depth.items() for word in item), *UNSHARED]
    copy = build(arch, *plain)
    copy.load_state_dict(
        {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
        | {name: value for name, value in copy.named_buffers() if name in copy.state_dict()}
    )
    return copy


@pytest.mark.parametrize(("arch", "flags"), TINY_ARCHS)
def test_gradient_is_the_sum_of_the_untied_gradients(arch, flags):
    model = build(arch, *flags)
    copy = untied_copy(model, arch, flags)
    batch = random_batch()
    for each in (model, copy):
        normalised(each, each(**batch)).square().mean().backward()
    for stack, plain in ((model.encoder, copy.encoder), (model.decoder, copy.decoder)):
        owners = stack.layers.sharing.owners
        for owner in set(owners):
            users = [index for index, its_owner in enumerate(owners) if its_owner == owner]
            assert len(users) > 1
            for name, parameter in stack.layers[owner].named_parameters():
                summed = sum(dict(plain.layers[user].named_parameters())[name].grad for user in users)
                assert torch.allclose(parameter.grad, summed, rtol=1e-4, atol=1e-7), name


# --- 4. counts ---


def layer_parameters(width: int, ffn: int, attentions: int) -> int:
    """Attention: four biased d x d projections and a LayerNorm each; FFN: two biased matrices and a LayerNorm."""
    return attentions * (4 * (width * width + width) + 2 * width) + 2 * width * ffn + ffn + width + 2 * width


def model_parameters(vocabulary: int, width: int, ffn: int, sets: int) -> int:
    """One tied embedding, sinusoidal positions, M sets in each stack, Post-LN."""
    return vocabulary * width + sets * (layer_parameters(width, ffn, 1) + layer_parameters(width, ffn, 2))


def count_on_meta(arch: str, *flags: str, vocabulary: int = 32768) -> int:
    args = parse(arch, "--share-all-embeddings", *flags)
    dictionary = build_dictionary(vocabulary)
    with torch.device("meta"):
        model = build_model(args, TranslationTask(args, dictionary, dictionary))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("arch", STRATEGY_ARCHS)
@pytest.mark.parametrize("layers", ["6", "12", "18"])
def test_base_model_has_the_published_count_at_any_depth(arch, layers):
    count = count_on_meta(arch, "--encoder-layers", layers, "--decoder-layers", layers)
    assert count == model_parameters(32768, 512, 2048, 6) == 60_915_712


def test_universal_matches_it():
    assert count_on_meta("transformer_shared_universal") == model_parameters(32768, 1024, 4096, 1) == 62_947_328


def test_unshared_depth_for_comparison():
    assert count_on_meta("transformer_shared_cycle", *UNSHARED) == model_parameters(32768, 512, 2048, 12) == 105_054_208


@pytest.mark.parametrize(
    ("size", "width", "ffn"),
    [("_iwslt_de_en", 512, 1024), ("_wmt_en_de", 512, 2048), ("_wmt_en_de_big", 1024, 4096)],
)
def test_counts_of_the_sizes(size, width, ffn):
    expected = model_parameters(1000, width, ffn, 6)
    for preset in ("sequence", "cycle", "cycle_rev"):
        assert count_on_meta(f"transformer_shared_{preset}{size}", vocabulary=1000) == expected
    universal = model_parameters(1000, 2 * width, 2 * ffn, 1)
    assert count_on_meta(f"transformer_shared_universal{size}", vocabulary=1000) == universal


def test_every_preset_and_size_is_registered():
    for preset in PRESETS:
        for size in SIZES:
            assert issubclass(ARCH_MODEL_REGISTRY[f"transformer_shared_{preset}{size}"], TransformerModel)


# --- 5. stepwise decoding equals the full forward pass ---


def assert_stepwise_equals_full(model, steps: int = 6, make_batch=random_batch) -> None:
    """Decode step by step, reordering each sentence's beams with repetition, against a full forward pass."""
    generator = torch.Generator().manual_seed(3)
    beams, sentences = 3, 2
    batch = make_batch(sentences=beams * sentences, length=steps)
    encoder_out = model.encoder(batch["src_tokens"][:sentences], batch["src_lengths"][:sentences])
    repeated = torch.arange(sentences).repeat_interleave(beams)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, repeated)
    tokens, state = batch["prev_output_tokens"], {}
    for step in range(1, steps + 1):
        if step > 1:
            order = repeated * beams + torch.randint(0, beams, (len(repeated),), generator=generator)
            tokens = tokens[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
        stepwise = model.decoder(tokens[:, :step], encoder_out=encoder_out, incremental_state=state)
        full = model.decoder(tokens[:, :step], encoder_out=encoder_out)
        difference = (normalised(model, stepwise)[:, -1] - normalised(model, full)[:, -1]).abs().max()
        assert difference < 1e-4, (step, difference)


@pytest.mark.parametrize(("arch", "flags"), TINY_ARCHS)
def test_stepwise_equals_full(arch, flags):
    with torch.no_grad():
        assert_stepwise_equals_full(build(arch, *flags))


@pytest.mark.parametrize("name", VARIANTS)
def test_stepwise_equals_full_in_every_variant(name):
    with torch.no_grad():
        assert_stepwise_equals_full(variant(name))


def test_one_layer_object_in_two_slots_would_be_caught():
    """The fault that N layer objects avoid: one cache for two layers."""
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    model.decoder.layers[3] = model.decoder.layers[0]
    with torch.no_grad(), pytest.raises(AssertionError):
        assert_stepwise_equals_full(model)


@pytest.mark.parametrize("beam", [1, 4])
def test_beam_search_scores_are_those_of_a_full_forward_pass(beam):
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    generator = SequenceGenerator([model], build_dictionary(), beam_size=beam, max_len_b=8, normalize_scores=False)
    batch = random_batch()
    found = generator.generate([model], {"net_input": {k: batch[k] for k in ("src_tokens", "src_lengths")}})
    for sentence, hypotheses in enumerate(found):
        tokens = hypotheses[0]["tokens"]
        inputs = torch.cat([tokens.new_tensor([2]), tokens[:-1]])[None]
        source = batch["src_tokens"][sentence : sentence + 1]
        with torch.no_grad():
            scores = normalised(model, model(source, source.ne(1).sum(1), inputs))[0]
        expected = scores.gather(1, tokens[:, None]).sum()
        assert torch.allclose(hypotheses[0]["score"], expected, atol=1e-4)


# --- upstream's options with sharing ---


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_a_step_and_stays_tied(name):
    model = variant(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(**random_batch())
    features = output[0]
    features.square().mean().backward()
    optimizer.step()
    for stack in (model.encoder, model.decoder):
        for index, owner in enumerate(stack.layers.sharing.owners):
            assert stack.layers[index].self_attn.k_proj.weight is stack.layers[owner].self_attn.k_proj.weight


def test_alignment_heads():
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    for layer in range(4):
        _, extra = model(**random_batch(), alignment_layer=layer)
        assert extra["attn"][0].shape == (3, 7, 7)


def test_torchscript():
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    scripted = torch.jit.script(model)
    batch = random_batch()
    assert torch.allclose(scripted(**batch)[0], model(**batch)[0], atol=1e-6)


# --- the line at start-up ---


def test_training_says_when_nothing_is_shared(caplog):
    model = build(REV, *TINY, "--encoder-layers", "1", "--encoder-sharing", "none", "--decoder-sharing", "none")
    with caplog.at_level("INFO", logger="fairseq_sharing.shared_model"):
        model.train()
    assert caplog.messages == [
        "encoder: 1 layer, each with its own parameters",
        "decoder: 12 layers, each with its own parameters",
    ]


def test_training_logs_each_stack_once(caplog):
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    with caplog.at_level("INFO", logger="fairseq_sharing.shared_model"):
        model.eval()
        assert not caplog.messages
        model.train()
        model.train()
    encoder, decoder = (2 * layer_parameters(16, 32, attentions) for attentions in (1, 2))
    assert caplog.messages == [
        f"encoder: 4 layers from 2 parameter sets (cycle_rev): 0 1 1 0; {encoder:,} parameters saved",
        f"decoder: 4 layers from 2 parameter sets (cycle_rev): 0 1 1 0; {decoder:,} parameters saved",
    ]
