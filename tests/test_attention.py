"""Cross-attention that computes keys and values once for each parameter set: the same results, and less computed."""

import copy
import itertools
import pickle

import pytest
import test_s2t_transformer_shared as speech
import test_transformer_lm_shared as language_models
import test_transformer_shared as translation
import torch
import torch.nn.functional as F
from conftest import FOUR_FROM_TWO, TINY, build, build_dictionary, random_batch
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from fairseq_sharing.attention import SharedProjection
from fairseq_sharing.sharing import untie_layers

REV, OWNERS = "transformer_shared_cycle_rev", [0, 1, 1, 0]
DROPOUT = ["--dropout", "0.2", "--attention-dropout", "0.3", "--activation-dropout", "0.1"]
# Models that share cross-attention: how to build them and what to feed them.
MODELS = {
    "translation": (lambda: build(REV, *TINY, *FOUR_FROM_TWO, *DROPOUT), random_batch),
    "pre-LN": (lambda: build(REV, *TINY, *FOUR_FROM_TWO, *DROPOUT, "--decoder-normalize-before"), random_batch),
    "attention only": (lambda: build(REV, *TINY, *FOUR_FROM_TWO, "--sharing-parts", "attention"), random_batch),
    "decoder wider": (lambda: translation.variant("decoder wider"), random_batch),
    "universal": (lambda: build("transformer_shared_universal", *TINY, "--decoder-layers", "3"), random_batch),
    "assignment": (lambda: translation.variant("assignment"), random_batch),
    "admin": (lambda: build(REV, *TINY, *FOUR_FROM_TWO, "--residual-scaling", "admin-static"), random_batch),
    "speech": (lambda: speech.build(speech.REV, *speech.SETS, *DROPOUT), speech.random_batch),
}
# Models that recompute layers in training, or leave some out: right, and not faster.
NOT_FASTER = {
    "activation checkpointing": ["--checkpoint-activations"],
    "layerdrop": ["--decoder-layerdrop", "0.5"],
}


def stand_alone(model):
    """Return a copy, tied as before, in which every layer computes everything itself as in fairseq."""
    alone = copy.deepcopy(model)
    for module in alone.modules():
        if hasattr(module, "stand_alone"):
            module.stand_alone()
        if isinstance(module, MultiheadAttention):
            module.init_incremental_state()
    return alone


def train_step(model, batch, seed: int = 4):
    """Return output and gradients of a training step."""
    torch.manual_seed(seed)
    model.train().zero_grad()
    output = model(**batch)[0]
    output.square().mean().backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_trained_alike(model, batch) -> None:
    (ours, our_gradients), (theirs, their_gradients) = (train_step(each, batch) for each in (model, stand_alone(model)))
    assert torch.equal(ours, theirs)
    for name, gradient in their_gradients.items():
        assert torch.allclose(our_gradients[name], gradient, rtol=1e-5, atol=1e-7), name
    assert any(name.endswith("encoder_attn.k_proj.weight") and each.any() for name, each in our_gradients.items())


def count_projections(monkeypatch, model, run) -> int:
    """Return how often the decoder's keys and values of the encoder output are computed."""
    weights = {
        id(getattr(layer.encoder_attn, name).weight) for layer in model.decoder.layers for name in ("k_proj", "v_proj")
    }
    count, linear = [0], F.linear

    def counting(x, weight, bias=None):
        count[0] += id(weight) in weights
        return linear(x, weight, bias)

    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", counting)
        run()
    return count[0]


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_and_projects_once_for_each_set(name, monkeypatch):
    make, make_batch = MODELS[name]
    model, batch = make(), make_batch()
    assert_trained_alike(model, batch)
    layers, sets = len(model.decoder.layers), len(set(model.decoder.layers.sharing.owners))
    assert sets < layers
    for each, expected in ((model, sets), (stand_alone(model), layers)):
        assert count_projections(monkeypatch, each, lambda each=each: train_step(each, batch)) == 2 * expected


@pytest.mark.parametrize("name", NOT_FASTER)
def test_what_computes_layers_again_or_not_at_all_trains_as_before(name):
    model = build(REV, *TINY, *FOUR_FROM_TWO, *DROPOUT, *NOT_FASTER[name])
    assert_trained_alike(model, random_batch())
    assert not any(isinstance(module, SharedProjection) for module in model.modules())


def test_what_shares_no_attention_stays_fairseqs():
    unshared = build(REV, *TINY, *FOUR_FROM_TWO[:4], "--encoder-sharing", "none", "--decoder-sharing", "none")
    ffn_only = build(REV, *TINY, *FOUR_FROM_TWO, "--sharing-parts", "ffn")
    lm = language_models.build("transformer_lm_shared_cycle", *language_models.TINY, "--decoder-unique-layers", "2")
    for model in (unshared, ffn_only, lm):
        assert not any(isinstance(module, SharedProjection) for module in model.modules())
        attentions = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
        assert len({attention._incremental_state_id for attention in attentions}) == len(attentions)


def test_passes_over_one_encoder_output_are_apart():
    """Each has its own graph, which its own backward pass may free."""
    model = build(REV, *TINY, *FOUR_FROM_TWO, "--dropout", "0").train()
    batch = random_batch()
    encoded = model.encoder(batch["src_tokens"], batch["src_lengths"])
    encoded["encoder_out"] = [encoded["encoder_out"][0].detach()]
    outputs = [model.decoder(batch["prev_output_tokens"], encoder_out=encoded)[0] for _ in range(2)]
    for output in outputs:
        output.sum().backward()
    with torch.no_grad():
        model.decoder.layers[0].encoder_attn.k_proj.weight.add_(1)
    changed = model.decoder(batch["prev_output_tokens"], encoder_out=encoded)[0]
    assert torch.equal(changed, stand_alone(model).decoder(batch["prev_output_tokens"], encoder_out=encoded)[0])
    assert not torch.allclose(changed, outputs[0])


def test_nothing_is_kept_between_passes(monkeypatch):
    """Also after an error in the middle of one: fairseq goes on after running out of memory."""
    model = build(REV, *TINY, *FOUR_FROM_TWO).train()
    shelves = [module.shelf for module in model.modules() if isinstance(module, SharedProjection)]
    assert len(shelves) == 8 and len({id(shelf) for shelf in shelves}) == 4
    model(**random_batch())
    assert all(shelf.output is None for shelf in shelves)
    with monkeypatch.context() as patched:
        patched.setattr(model.decoder.layers[2], "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**random_batch())
    assert sum(shelf.output is not None for shelf in {id(shelf): shelf for shelf in shelves}.values()) == 4
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(module.shelf.output is None for module in twin.modules() if isinstance(module, SharedProjection))
        assert_trained_alike(twin, random_batch())
    model.train()
    assert all(shelf.output is None for shelf in shelves)


def decode_step_by_step(model, steps: int = 5, seed: int = 3):
    """Decode with three beams a sentence and reorder them, also across the end of a sentence; return scores, caches."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(sentences=6, length=7)
    rows = torch.arange(2).repeat_interleave(3)
    encoded = model.encoder(batch["src_tokens"][:2], batch["src_lengths"][:2])
    encoded = model.encoder.reorder_encoder_out(encoded, rows)
    tokens, state, outputs = batch["prev_output_tokens"], {}, []
    for step in range(1, steps + 1):
        if step > 1:
            order = rows * 3 + torch.randint(0, 3, (6,), generator=generator)
            if step == 4:  # the first sentence is done
                order = order[3:]
            elif step > 4:
                order = order[:3]
            tokens = tokens[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
        outputs.append(model.decoder(tokens[:, :step], encoder_out=encoded, incremental_state=state)[0])
    return torch.cat(outputs), state


@torch.no_grad()
def test_decoding_is_the_same_with_one_cache_for_each_set(monkeypatch):
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    alone = stand_alone(model)
    (ours, our_state), (theirs, their_state) = map(decode_step_by_step, (model, alone))
    assert torch.equal(ours, theirs)
    assert len(our_state) == 4 + 2 and len(their_state) == 4 + 4
    for attention, factor in (("self_attn", 1), ("encoder_attn", 2)):  # N / M of the bytes

        def size(each, state, attention=attention):
            names = {getattr(layer, attention)._incremental_state_id for layer in each.decoder.layers}
            return sum(state[f"{name}.attn_state"]["prev_key"].nbytes for name in names)

        assert size(alone, their_state) == factor * size(model, our_state) > 0
    for each, expected in ((model, 2), (alone, 4)):
        assert count_projections(monkeypatch, each, lambda each=each: decode_step_by_step(each)) == 2 * expected


@torch.no_grad()
def test_a_scripted_generator_decodes_the_same():
    """The whole search in TorchScript, with caches and their reordering."""
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    batch = random_batch()
    sample = {"net_input": {name: batch[name] for name in ("src_tokens", "src_lengths")}}
    found = []
    for each in (model, stand_alone(model)):
        generator = SequenceGenerator([each], build_dictionary(), beam_size=3, max_len_b=8)
        scripted = torch.jit.script(generator)
        found += [generator.generate([each], sample), scripted(sample)]
    for other in found[1:]:
        for ours, theirs in zip(*(itertools.chain(*each) for each in (found[0], other)), strict=True):
            assert torch.equal(ours["tokens"], theirs["tokens"])
            assert torch.allclose(ours["positional_scores"], theirs["positional_scores"], atol=1e-6)


def test_untied_layers_compute_for_themselves():
    model = build(REV, *TINY, *FOUR_FROM_TWO)
    untie_layers(model.decoder.layers)
    assert {type(layer.encoder_attn.k_proj) for layer in model.decoder.layers} == {nn.Linear}
    with torch.no_grad():
        for layer in model.decoder.layers:
            for parameter in layer.encoder_attn.parameters():
                parameter.add_(torch.randn_like(parameter))
        translation.assert_stepwise_equals_full(model)
