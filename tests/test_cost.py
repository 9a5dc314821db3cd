"""What `fairseq-sharing show` says a model costs, against written formulas and against fairseq and torch at work."""

import json

import pytest
import torch
from conftest import FOUR_FROM_TWO, TINY, build, random_batch
from fairseq.distributed import legacy_distributed_data_parallel as legacy
from fairseq.optim.adam import FairseqAdam
from fairseq.optim.fp16_optimizer import FP16Optimizer, MemoryEfficientFP16Optimizer
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairseq_sharing.tools.activations import measure_activations
from fairseq_sharing.tools.cost import measure
from fairseq_sharing.tools.flops import count_flops
from fairseq_sharing.tools.main import main
from fairseq_sharing.tools.model import parse_training, read_architecture
from fairseq_sharing.tools.show import format_report
from fairseq_sharing.tools.sizes import count_memory

C, F, H, V, S, T = 16, 32, 2, 40, 9, 6  # width, FFN, heads, symbols, length of source and target
REV = ("transformer_shared_cycle_rev", *TINY, *FOUR_FROM_TWO)
LM = ["--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2"]
LM += ["--decoder-layers", "4", "--decoder-input-dim", "16", "--decoder-output-dim", "16"]
MLM = ["--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "2"]
MLM += ["--encoder-layers", "4"]
S2T = ["--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32", "--encoder-layers", "4", "--decoder-layers", "4"]
S2T += ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2", "--conv-channels", "24"]


def linear(inputs: int, outputs: int) -> int:
    return 2 * inputs * outputs


def layer(width: int, others: int) -> int:
    """FLOPs of a layer for one token that looks at so many: projections, two products of attention, FFN."""
    return 4 * linear(width, width) + 2 * linear(width, others) + 2 * linear(width, F)


def decoder(tokens: int, source: int, layers: int = 4, sets: int = 4) -> int:
    """FLOPs of a decoder; the keys and values of cross-attention are of the source, and each set has them once."""
    cross = 2 * linear(C, C) + 2 * linear(C, source)
    return layers * tokens * (layer(C, tokens) + cross) + sets * source * 2 * linear(C, C)


def convolutions(frames: int) -> tuple[int, int]:
    """Return FLOPs of the two gated convolutions (kernel 5, stride 2; 80 -> 24, 12 -> 2 x 16) and the frames left."""
    first = (frames - 1) // 2 + 1
    second = (first - 1) // 2 + 1
    return first * 5 * linear(80, 24) + second * 5 * linear(12, 2 * C), second


CONVOLVED, FRAMES = convolutions(41)
CASES = {
    "transformer": (
        [*TINY, "--encoder-layers", "4", "--decoder-layers", "4"],
        {"encoder": 4 * S * layer(C, S), "decoder": decoder(T, S), "head": T * linear(C, V)},
    ),
    "transformer_shared_cycle_rev": (
        [*TINY, *FOUR_FROM_TWO, "--factorized-embed-dim", "8"],
        {
            "embeddings": (S + T) * linear(8, C),
            "encoder": 4 * S * layer(C, S),
            "decoder": decoder(T, S, sets=2),
            "head": T * (linear(C, 8) + linear(8, V)),
        },
    ),
    "transformer_lm": (LM, {"decoder": 4 * T * layer(C, T), "head": T * linear(C, V)}),
    "transformer_lm_shared_cycle": (
        [*LM, "--decoder-unique-layers", "2", "--adaptive-input", "--adaptive-input-cutoff", "10,20"]
        + ["--adaptive-softmax-cutoff", "10,20", "--criterion", "adaptive_loss"],
        {
            "embeddings": T * linear(C, C),
            "decoder": 4 * T * layer(C, T),
            "head": T * (linear(C, 12) + linear(C, 4) + linear(4, 10) + linear(C, 1) + linear(1, 20)),
        },
    ),
    "s2t_transformer_shared_sequence": (
        [*S2T, "--encoder-unique-layers", "2", "--decoder-unique-layers", "1"],
        {
            "convolutions": CONVOLVED,
            "encoder": 4 * FRAMES * layer(C, FRAMES),
            "decoder": decoder(T, FRAMES, sets=1),
            "head": T * linear(C, V),
        },
    ),
    "albert_encoder": (
        [*MLM, "--factorized-embed-dim", "8"],
        {
            "embeddings": S * linear(8, C),
            "encoder": 4 * S * layer(C, S),
            "head": S * (linear(C, 8) + linear(8, V)),
        },
    ),
    "roberta": (MLM, {"encoder": 4 * S * layer(C, S), "head": S * (linear(C, C) + linear(C, V))}),
}


@pytest.mark.parametrize("arch", CASES)
def test_flops_follow_the_formula(arch):
    flags, expected = CASES[arch]
    model = read_architecture(arch, flags, V).model
    source, target = {"s2t": (41, T), "albert": (S, 0), "roberta": (S, 0)}.get(arch.split("_")[0], (S, T))
    tokens = target or source
    assert count_flops(model, source, target) == {name: value / tokens for name, value in expected.items()}


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        (["--sharing-parts", "attention"], 2),
        (["--sharing-parts", "ffn"], 4),
        (["--decoder-unique-layers", "4"], 4),
        (["--checkpoint-activations", "--ddp-backend", "legacy_ddp"], 4),
        (["--decoder-layerdrop", "0.5", "--ddp-backend", "legacy_ddp"], 4),
    ],
)
def test_keys_and_values_of_the_source_count_as_often_as_training_computes_them(flags, sets):
    figures = measure(read_architecture(REV[0], [*REV[1:], *flags], V), S, T)
    assert figures.flops["encoder"] * T == 4 * S * layer(C, S)
    assert figures.flops["decoder"] * T == decoder(T, S, sets=sets)
    assert [each["source_projections"] for each in figures.stacks.values()] == [0, sets]
    assert ("only keys and values" in format_report(figures)) == (sets < 4)
    assert ("saves no computation" in format_report(figures)) == (sets == 4)


@pytest.mark.parametrize("parts", ["attention,ffn,norm", "attention", "ffn", "attention,ffn"])
def test_components_follow_the_formula(parts):
    attention, ffn = 4 * (C * C + C), 2 * C * F + F + C
    figures = measure(read_architecture(REV[0], [*REV[1:], "--sharing-parts", parts], V))
    sets = {name: 2 if name in parts else 4 for name in ("attention", "ffn", "norm")}
    norms = [2 * C * (2 + 3), 2 * C * (1 + 1), 2 * C * (1 + 2)]  # of both stacks: all, FFN's, attention's
    if parts == "attention":
        unique_norms = 4 * norms[1] + 2 * norms[2]
    elif parts == "ffn":
        unique_norms = 2 * norms[1] + 4 * norms[2]
    else:
        unique_norms = sets["norm"] * norms[0]
    unique = {
        "embeddings": 2 * V * C,
        "encoder": sets["attention"] * attention + sets["ffn"] * ffn,
        "decoder": sets["attention"] * 2 * attention + sets["ffn"] * ffn,
        "norms": unique_norms,
        "head": V * C,
    }
    unshared = {
        "embeddings": 2 * V * C,
        "encoder": 4 * (attention + ffn),
        "decoder": 4 * (2 * attention + ffn),
        "norms": 4 * norms[0],
        "head": V * C,
    }
    assert figures.parameters == {name: {"unique": unique[name], "without sharing": unshared[name]} for name in unique}
    assert figures.unique == sum(parameter.numel() for parameter in build(*REV, "--sharing-parts", parts).parameters())


def tensors_of(value):
    """Yield the tensors in nested containers."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for each in value.values() for tensor in tensors_of(each))
    elif isinstance(value, (list, tuple)):
        yield from (tensor for each in value for tensor in tensors_of(each))


def size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", FairseqAdam), ("--fp16", FP16Optimizer), ("--memory-efficient-fp16", MemoryEfficientFP16Optimizer)],
)
def test_memory_is_what_fairseqs_optimizers_hold(precision, optimizer):
    flags = [] if precision == "fp32" else [precision, "--fp16-no-flatten-grads"]  # flat copies need a GPU, and as much
    config = parse_training(REV[0], [*REV[1:], "--optimizer", "adam", "--lr", "0.001", *flags])
    model = build(*REV)
    model = model if precision == "fp32" else model.half()
    parameters = list(model.parameters())
    if precision == "fp32":
        adam = optimizer(config.optimizer, parameters)
    else:
        adam = optimizer.build_optimizer(config, parameters)
    adam.backward(sum(parameter.float().mean() for parameter in parameters))
    adam.clip_grad_norm(0)
    adam.step()
    inner = adam if precision == "fp32" else getattr(adam, "fp32_optimizer", None) or adam.wrapped_optimizer
    masters = list(getattr(adam, "fp32_params", []))
    found = {
        "weights": size(parameters),
        "gradients": size(parameter.grad for parameter in parameters),
        "Adam's moments": size(tensors_of(dict(inner.optimizer.state))),
        "fp32 masters": size(masters) + size(master.grad for master in masters),
    }
    assert count_memory(model)[precision] == found


def test_workers_exchange_each_shared_gradient_once(monkeypatch):
    sent = []
    monkeypatch.setattr(legacy.utils, "get_world_size", lambda group: 2)
    monkeypatch.setattr(legacy.utils, "all_reduce", lambda buffer, group: sent.append(buffer))
    model = build(*REV)
    worker = legacy.LegacyDistributedDataParallel(model, process_group=None, buffer_size=1)  # each tensor by itself
    worker(**random_batch())[0].sum().backward()
    worker.all_reduce_grads()
    assert size(sent) == measure(read_architecture(REV[0], REV[1:], V)).all_reduced["fp32"]


def peak_by_profiler(model, sentences: int) -> int:
    """Return the most bytes that torch's allocator held at once during one training step of a real model."""
    model.train()
    source, target = torch.full((sentences, S), 5), torch.full((sentences, T), 5)
    lengths = torch.full((sentences,), S)
    with sdpa_kernel(SDPBackend.MATH), torch.profiler.profile(profile_memory=True) as profile:
        scores = model(source, lengths, target)[0]
        log_probs = torch.log_softmax(scores, -1, dtype=torch.float32).flatten(0, 1)
        torch.nn.functional.nll_loss(log_probs, torch.zeros(len(log_probs), dtype=torch.long)).backward()
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_activations_are_what_the_allocator_holds():
    """A model so small, and a batch so large, that gradients of weights do not count."""
    flags = [*TINY, "--encoder-layers", "2", "--decoder-layers", "2"]
    subject = read_architecture("transformer", flags, V)
    predicted = measure_activations(subject.model, S, T, sentences=64)
    assert predicted == pytest.approx(peak_by_profiler(build("transformer", *flags), 64), rel=0.05)
    checkpointed = read_architecture("transformer", [*flags, "--checkpoint-activations"], V)
    assert measure_activations(checkpointed.model, S, T, sentences=64) < 0.6 * predicted
    layerdrop = read_architecture("transformer", [*flags, "--decoder-layerdrop", "0.5"], V)
    assert measure_activations(layerdrop.model, S, T, sentences=64) == predicted


@pytest.mark.parametrize("arch", ["s2t_transformer_shared_sequence", "albert_encoder"])
def test_sharing_saves_keys_and_values_of_the_source_alone(arch):
    """Their operations and their bytes; and of speech, which has lengths to be followed, more than one sentence."""
    flags, stacks = {"s": (S2T, ["encoder", "decoder"]), "a": (MLM, ["encoder"])}[arch[0]]
    flags = [*flags, *(word for stack in stacks for word in (f"--{stack}-layers", "2"))]
    one = [word for stack in stacks for word in (f"--{stack}-unique-layers", "1")]
    none = [word for stack in stacks for word in (f"--{stack}-sharing", "none")]
    shared, unshared = (
        measure(read_architecture(arch, [*flags, *sharing], V), *((41, T) if arch[0] == "s" else ()), sentences=2)
        for sharing in (one, none)
    )
    saved = FRAMES if arch[0] == "s" else 0  # positions whose keys and values the second layer does not compute
    assert unshared.activations - shared.activations == 2 * 2 * saved * C * 4
    assert (unshared.total_flops - shared.total_flops) * T == pytest.approx(2 * saved * linear(C, C))
    assert shared.unique < unshared.unique == unshared.unshared == shared.unshared


def test_json_and_markdown_hold_the_same_figures(data, capsys):
    flags = [*REV[1:], "--share-all-embeddings", "--data", str(data), "--source-length", "9", "--target-length", "6"]
    assert main(["show", "--arch", REV[0], *flags, "--activation-memory", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    symbols = sum(1 for _ in (data / "dict.en.txt").open(encoding="utf-8")) + 4
    assert figures["vocabulary"] == [symbols, symbols] and figures["lengths"] == [9, 6]
    assert figures["parameters"]["embeddings"]["unique"] == symbols * C
    assert figures["stacks"]["encoder"]["assignment"] == [0, 1, 1, 0]
    assert figures["activations"] > 0 and figures["sentences"] == 2
    assert figures["total_flops"] == sum(figures["flops"].values())
    assert main(["show", "--arch", REV[0], *flags, "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert f"### {REV[0]}" in shown and "  set   0 1 1 0" in shown
    cells = [cell.strip() for cell in next(line for line in shown.splitlines() if "| total" in line).split("|")]
    assert cells[2:4] == [f"{figures['total_parameters'][name]:,}" for name in ("unique", "without sharing")]
    assert "| head (tied to embeddings)" in shown
    assert "keys and values of the encoder\noutput are computed and kept once for each" in shown
    assert "9 tokens of source and 6 tokens of target" in shown


def test_wrong_lengths_and_folders_cost_one_sentence(tmp_path, capsys):
    def fails(*flags) -> str:
        assert main(["show", *map(str, flags)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
        return captured.err

    tiny = ["--arch", REV[0], *REV[1:], "--vocab-size", "40"]
    assert "--source-length 0 must be between 1 and 1024" in fails(*tiny, "--source-length", 0)
    assert "--target-length 9999 must be between 1 and 1024" in fails(*tiny, "--target-length", 9999)
    assert "--activation-memory 0 must be at least 1" in fails(*tiny, "--activation-memory", 0)
    assert "does not exist" in fails("--arch", REV[0], "--data", tmp_path / "none")
    assert "dict.txt" in fails("--arch", "transformer_lm_shared_cycle", "--data", tmp_path)
    adaptive = ["--adaptive-softmax-cutoff", "10,20", "--criterion", "adaptive_loss", "--decoder-unique-layers", "2"]
    sentence = fails(
        "--arch", "transformer_lm_shared_cycle", *LM, *adaptive, "--vocab-size", 40, "--activation-memory", 1
    )
    assert "depend on the words" in sentence
    assert "--path takes no further flags: --data" in fails("--path", "x.pt", "--data", tmp_path)
