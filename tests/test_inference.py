"""Packed matrices in decoding: the same results but for rounding, and never a matrix that has changed."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import FOUR_FROM_TWO, TINY, build, build_dictionary, random_batch
from fairseq.models import BaseFairseqModel
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from fairseq_sharing import inference
from fairseq_sharing.inference import JointLinear, PackedLinear, pack_linears

REV = "transformer_shared_cycle_rev"
SMALLEST = inference.SMALLEST
# A torch that has oneDNN but not the operators that `can_pack` looks for fails here: its decoding would just be slower.
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    """Pack those of tiny models too."""
    monkeypatch.setattr(inference, "SMALLEST", 0)


def prepare(model, **generation):
    """Do what fairseq-generate does before it decodes."""
    model.prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(**generation)))
    return model


def packed_of(model) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def search(model) -> list:
    batch = random_batch()
    generator = SequenceGenerator([model], build_dictionary(), beam_size=3, max_len_b=8)
    sample = {"net_input": {name: batch[name] for name in ("src_tokens", "src_lengths")}}
    return [hypothesis for sentence in generator.generate([model], sample) for hypothesis in sentence]


def build_pair(*flags):
    """Return a model and a copy of it that is ready to decode."""
    model = build(REV, *TINY, *FOUR_FROM_TWO, *flags)
    return model, prepare(copy.deepcopy(model))


def test_a_search_finds_the_same_with_one_copy_for_each_parameter():
    model, fast = build_pair("--share-all-embeddings")
    for ours, theirs in zip(search(fast), search(model), strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
        assert torch.allclose(ours["positional_scores"], theirs["positional_scores"], atol=1e-5)
    used = {id(module.packed): module for module in packed_of(fast) if module.packed.copy[-2] is not None}
    # For each of two sets: query, key and value together; out; query and out of the cross-attention; fc1, fc2.
    assert len(used) == 2 * 6 + 1 and not packed_of(fast.encoder)
    assert list(fast.state_dict()) == list(model.state_dict())


def test_what_is_large_enough_is_packed(monkeypatch):
    """With the limit that users have: matrices of 512 x 512, and of 256 x 256 only where three are one product."""
    monkeypatch.setattr(inference, "SMALLEST", SMALLEST)
    for width, kinds in (
        (512, {"q_proj": JointLinear, "out_proj": PackedLinear}),
        (256, {"q_proj": JointLinear, "out_proj": nn.Linear}),
    ):
        sizes = [word for stack in ("encoder", "decoder") for word in (f"--{stack}-embed-dim", str(width))]
        layers = ["--encoder-layers", "1", "--encoder-unique-layers", "1", "--decoder-layers", "2"]
        model = prepare(build(REV, *sizes, *layers, "--decoder-unique-layers", "1"))
        attention = model.decoder.layers[1].self_attn
        assert {name: type(getattr(attention, name)) for name in kinds} == kinds


def test_a_model_around_a_shared_one_is_made_ready_for_decoding():
    class Outer(BaseFairseqModel):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    inner = build(REV, *TINY, *FOUR_FROM_TWO)
    Outer(inner).make_generation_fast_(beamable_mm_beam_size=5, need_attn=False)
    assert packed_of(inner) and not any(layer.need_attn for layer in inner.decoder.layers)


def test_torchscript():
    """It multiplies as torch does."""
    model, fast = build_pair()
    x = torch.randn(3, 2, 16)
    plain, packed = (each.decoder.layers[0].self_attn for each in (model, fast))
    expected, _ = plain(x, x, x)
    found, _ = torch.jit.script(packed)(x, x, x)
    assert torch.allclose(found, expected, atol=1e-6)


def test_small_matrices_stay_torchs(monkeypatch):
    """Their products would take longer."""
    monkeypatch.setattr(inference, "SMALLEST", 16 * 32)
    _, fast = build_pair()
    names = {name.split(".")[-1] for name, module in fast.named_modules() if isinstance(module, PackedLinear)}
    assert names == {"fc1", "fc2", "q_proj", "k_proj", "v_proj", "output_projection"}
    cross = [layer.encoder_attn for layer in fast.decoder.layers]
    assert not any(isinstance(attention.q_proj, PackedLinear) for attention in cross)


@torch.no_grad()
def test_three_projections_in_one_product(monkeypatch):
    """In fairseq's order one product gives all three; in any other each gives its own."""
    torch.manual_seed(0)
    plain = MultiheadAttention(8, 2, self_attention=True)
    fast = copy.deepcopy(plain)
    pack_linears(fast.modules())
    products, multiply = [], inference.multiply
    monkeypatch.setattr(inference, "multiply", lambda *given: (products.append(given), multiply(*given))[1])
    one, other = torch.randn(2, 1, 3, 8)

    def check(*calls):
        for name, x in calls:
            assert torch.allclose(getattr(fast, name)(x), getattr(plain, name)(x), atol=1e-6)

    check(("q_proj", one), ("k_proj", one), ("v_proj", one))
    assert len(products) == 1 and fast.q_proj.joint.left == (None, {})
    check(("k_proj", one), ("q_proj", one), ("k_proj", other), ("v_proj", one), ("v_proj", one), ("k_proj", one))
    check(("q_proj", one), ("q_proj", other), ("v_proj", other), ("k_proj", one), ("k_proj", other))
    fast.k_proj.weight.mul_(2), plain.k_proj.weight.mul_(2)
    check(*((name, x) for twice in range(2) for x in (one, other) for name in ("q_proj", "k_proj", "v_proj")))


def test_threads_may_share_a_model():
    """As they may share fairseq's: what one has left another does not take."""
    _, fast = build_pair()
    attention = fast.decoder.layers[0].self_attn
    inputs = [torch.randn(1, 64, 16) for _ in range(8)]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    expected = [[F.linear(x, each.weight, each.bias) for each in projections] for x in inputs]

    def project(number):
        with torch.no_grad():
            return all(
                torch.allclose(each(inputs[index % 8]), expected[index % 8][place], atol=1e-6)
                for index in range(number, number + 200)
                for place, each in enumerate(projections)
            )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(project, range(4)))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_decoder_that_shares_nothing_stays_torchs(stack):
    model = build("transformer_shared_cycle", *TINY, f"--{stack}-sharing", "none")
    assert bool(packed_of(prepare(model))) == (stack == "encoder")


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 1, 5), (1, 0)])
def test_products_of_every_shape(shape):
    """Also of slices and of nothing."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    fast = copy.deepcopy(plain)
    pack_linears([fast])
    with torch.no_grad():
        for x in (torch.randn(*shape, 6), torch.randn(*shape, 12)[..., ::2], torch.randn(6, *shape).movedim(0, -1)):
            assert torch.allclose(fast(x), plain(x), atol=1e-6)
    assert fast.packed.copy[-2] is not None


def test_a_changed_matrix_is_packed_again():
    """Loading, in-place changes, conversion, another parameter, a copy."""
    torch.manual_seed(0)
    layer, other = nn.Linear(6, 4), nn.Linear(6, 4)
    x = torch.randn(3, 6)
    tied = nn.Linear(6, 4)
    tied.weight, tied.bias = layer.weight, layer.bias
    pack_linears([layer, tied])
    assert layer.packed is tied.packed

    def load():
        layer.load_state_dict(other.state_dict())

    def assign():
        layer.load_state_dict({name: value + 1 for name, value in other.state_dict().items()}, assign=True)

    def fill():
        layer.weight.fill_(3)

    def convert():
        layer.weight.fill_(1 / 3)
        layer.half().float()

    def replace():
        layer.weight = nn.Parameter(torch.randn(4, 6))

    with torch.no_grad():
        for change in (lambda: None, load, assign, fill, convert, replace):
            change()
            for each in (layer, tied, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                assert torch.allclose(each(x), F.linear(x, each.weight, each.bias), atol=1e-6), change


def test_where_a_packed_matrix_cannot_be_used():
    """Gradients, other numbers and mixed precision are torch's."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    fast = copy.deepcopy(plain)
    pack_linears([fast])
    x = torch.randn(3, 6)
    assert torch.equal(fast(x), plain(x)) and fast(x).requires_grad
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype is torch.bfloat16
    with torch.inference_mode():
        assert torch.allclose(fast(x), plain(x), atol=1e-6)
    with torch.no_grad():
        assert torch.equal(fast.double()(x.double()), plain.double()(x.double()))


def test_torch_without_these_functions_decodes_as_before(monkeypatch):
    monkeypatch.setattr(inference, "can_pack", lambda: False)
    model, fast = build_pair()
    assert not packed_of(fast)
    for ours, theirs in zip(search(fast), search(model), strict=True):
        assert torch.equal(ours["positional_scores"], theirs["positional_scores"])
