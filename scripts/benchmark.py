"""Hold models that share layers against fairseq's own, Universal and Hugging Face's ALBERT: time, memory, files.

Two models, each in a process of its own, take turns, so that whatever else the machine does meets both; every ratio is
that of one turn. This is repeated with new processes, since each pair has other luck with its memory; the table gives
the median of all turns and their quartiles. Times are those of the clock and, on the CPU, of the processor, which other
work disturbs less. Weights and symbols are random: all beams run to the full length.

    python scripts/benchmark.py --short                       the table in a few minutes
    python scripts/benchmark.py --out results                 everything; results.json and results.md
    python scripts/benchmark.py --measure decode --decode 1x30 8x30 32x30 8x10 8x90
    python scripts/benchmark.py --measure train optimizer memory --vocab-size 32768
    python scripts/benchmark.py --measure ctranslate2 --checkpoint averaged.pt --data data/bin --subset test

For the CPU set OMP_NUM_THREADS, 1 unless the machine has nothing else to do.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import fairseq_sharing  # noqa: F401  before fairseq, which otherwise tells each process what is not installed

# isort: split
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models import build_model
from fairseq.optim.adam import Adam
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from fairseq_sharing.tools.model import filler_task, parse_architecture

MEASURES = ("train", "optimizer", "decode", "cache", "memory", "peak", "checkpoint", "import", "albert", "ctranslate2")
BEAM = 4
UNSHARED = ["--encoder-sharing", "none", "--decoder-sharing", "none"]
# Name -> ours, theirs, and what is measured of the pair.
SIZES = ("cache", "memory", "peak", "checkpoint")
PAIRS = {
    "same depth": ("cycle_rev", "stock", ("train", "optimizer", "decode", *SIZES)),
    "same depth, sequence": ("sequence", "stock", ("train", "decode")),
    "same depth, cycle": ("cycle", "stock", ("train", "decode")),
    "same parameters": ("cycle_rev", "stock M", ("train", "optimizer", "decode", *SIZES)),
    "universal": ("cycle_rev", "universal", ("train", "optimizer", "decode")),
    "universal, deeper": ("cycle_rev deeper", "universal", ("train",)),
    "nothing shared": ("none", "stock", ("train", "decode")),
}
SHORT = {  # pair -> what is measured in a few minutes
    "same depth": ("train", "optimizer", "decode", "cache", "memory", "checkpoint"),
    "universal": ("train",),
    "nothing shared": ("decode",),
}
ALBERT = {  # the base size, in transformers' words
    **{"vocab_size": 30000, "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072},
    **{"num_attention_heads": 12, "num_hidden_groups": 1},
}
ALBERT_LENGTH = 128
TIME, SPEED, SIZE = "time", "speed", "size"


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the most important pairs, few turns")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, help="only these")
    parser.add_argument("--pair", nargs="+", choices=PAIRS, metavar="PAIR", help=f"only these: {', '.join(PAIRS)}")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="layers of each stack (default: 12)")
    parser.add_argument("--sets", type=int, default=6, metavar="M", help="parameter sets of each stack (default: 6)")
    parser.add_argument("--width", type=int, default=512, metavar="C", help="width; the FFN's is four times it")
    parser.add_argument("--vocab-size", type=int, default=8000, metavar="V", help="symbols (default: 8,000)")
    parser.add_argument("--batch", default="8x30", metavar="BxT", help="sentences and length in training")
    parser.add_argument("--decode", nargs="+", default=None, metavar="BxT", help="sentences and length in decoding")
    parser.add_argument("--repeats", type=int, default=None, help="new pairs of processes (default: 5, short: 2)")
    parser.add_argument("--turns", type=int, default=None, help="of each model in each pair (default: 3, short: 2)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--checkpoint", help="a trained translation model, for ctranslate2")
    parser.add_argument("--data", help="its data folder")
    parser.add_argument("--subset", default="test", help="the part of the data to translate (default: test)")
    parser.add_argument("--out", metavar="NAME", help="write NAME.json and NAME.md")
    args = parser.parse_args(arguments)
    if args.repeats is None:
        args.repeats = 2 if args.short else 5
    if args.turns is None:
        args.turns = 2 if args.short else 3
    args.decode = args.decode or (["8x30"] if args.short else ["1x30", "8x10", "8x30", "8x90", "32x30"])
    for name, text in (("--batch", args.batch), *(("--decode", text) for text in args.decode)):
        if not re.fullmatch(r"[1-9]\d*x([2-9]|[1-9]\d+)", text):
            parser.error(f"{name} {text} must be sentences and a length of at least 2, such as 8x30")
    if not 1 <= args.sets <= args.layers:
        parser.error(f"--sets {args.sets} must be between 1 and --layers {args.layers}")
    if args.width % 64:
        parser.error(f"--width {args.width} must be a multiple of 64, the width of a head")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} must be at least 1")
    if args.turns < 2:
        parser.error(f"--turns {args.turns} must be at least 2, or there is no spread")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU")
    if (args.checkpoint is None) != (args.data is None):
        parser.error("--checkpoint and --data go together")
    if "ctranslate2" in (args.measure or []) and args.checkpoint is None:
        parser.error("--measure ctranslate2 needs --checkpoint and --data")
    return args


def flags_of(name: str, args) -> tuple[str, list[str]]:
    """Return architecture and flags of a model by the name it has in `PAIRS`."""

    def depth(number: int) -> list[str]:
        return ["--encoder-layers", str(number), "--decoder-layers", str(number)]

    def widths(width: int) -> list[str]:
        options = {"embed-dim": width, "ffn-embed-dim": 4 * width, "attention-heads": width // 64}
        return [
            word
            for stack in ("encoder", "decoder")
            for option, value in options.items()
            for word in (f"--{stack}-{option}", str(value))
        ]

    shared = ["--share-all-embeddings", *widths(args.width)]
    sets = ["--encoder-unique-layers", str(args.sets), "--decoder-unique-layers", str(args.sets)]
    if name == "universal":
        wide = widths(universal_width(args))
        return "transformer_shared_universal", ["--share-all-embeddings", *wide, *depth(args.sets)]
    if name in ("stock", "stock M"):
        return "transformer", [*shared, *depth(args.layers if name == "stock" else args.sets)]
    if name == "none":
        return "transformer_shared_cycle_rev", [*shared, *depth(args.layers), *UNSHARED]
    strategy, _, deeper = name.partition(" ")
    return f"transformer_shared_{strategy}", [*shared, *depth(args.layers * 3 // 2 if deeper else args.layers), *sets]


def universal_width(args) -> int:
    """Return the width at which one parameter set a stack, with its embedding, has the parameters of `--sets` sets.

    Rounded to heads of 64, so parameters differ by a few percent; with the paper's M = 6, width 512 and V = 32,768 it
    is the paper's 1,024. The matrices of an encoder layer have 12 times the square of the width, of a decoder layer 16.
    """
    layers = 12 + 16
    parameters = args.sets * layers * args.width**2 + args.vocab_size * args.width
    width = (math.sqrt(args.vocab_size**2 + 4 * layers * parameters) - args.vocab_size) / (2 * layers)
    return 64 * round(width / 64)


def build(name: str, args):
    """Build a model with random weights, always the same."""
    arch, flags = flags_of(name, args)
    torch.manual_seed(1)
    return build_model(parse_architecture(arch, flags), filler_task(args.vocab_size, args.vocab_size)).to(args.device)


def random_batch(sentences: int, length: int, args) -> dict:
    """Return a batch in the form of fairseq's criteria, without padding."""
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(4, args.vocab_size, (2, sentences, length), generator=generator)
    source[:, -1] = target[:, -1] = 2
    inputs = {
        "src_tokens": source,
        "src_lengths": torch.full((sentences,), length),
        "prev_output_tokens": target.roll(1, 1),
    }
    sample = {"net_input": inputs, "target": target, "ntokens": target.numel()}
    sample["net_input"] = {key: value.to(args.device) for key, value in inputs.items()}
    sample["target"] = target.to(args.device)
    return sample


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split("x")]


# --- taking turns ---


class Process:
    """An object in a process of its own: no model meets what another one has left in the allocator or in caches."""

    def __init__(self, kind: type, *arguments):
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.started = self.pool.submit(host, kind, arguments)

    def call(self, method: str, *arguments):
        """Return what a method of the object returns."""
        return self.pool.submit(call_hosted, method, arguments).result()

    def time(self, method: str, device: str = "cpu") -> dict[str, float]:
        """Return how long a method takes, in seconds of the clock and of the process."""
        return self.pool.submit(time_hosted, method, device).result()

    def close(self) -> None:
        """End the process, and give back its memory."""
        self.pool.shutdown()


def host(kind: type, arguments: tuple) -> None:
    """Make the object of this process."""
    global hosted
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.disable()  # each model would tell its layers
    hosted = kind(*arguments)


def end_with_parent() -> None:
    """End this process when the benchmark has ended, however it did."""
    multiprocessing.parent_process().join()
    os._exit(1)


def call_hosted(method: str, arguments: tuple):
    return getattr(hosted, method)(*arguments)


def time_hosted(method: str, device: str) -> dict[str, float]:
    if device == "cuda":
        torch.cuda.synchronize()
    clock, process = time.perf_counter(), time.process_time()
    getattr(hosted, method)()
    if device == "cuda":
        torch.cuda.synchronize()
    return {"wall": time.perf_counter() - clock, "cpu": time.process_time() - process}


def take_turns(tasks: dict, turns: int) -> dict[str, list[dict[str, float]]]:
    """Run each of the tasks so often, in turn; another one is first each time.

    Args:
        tasks: name -> a function without arguments that returns how long it took.
        turns: of each; one more before them warms up.

    Returns:
        name -> for each turn, seconds of the clock and of the process.
    """
    found = {name: [] for name in tasks}
    for turn in range(-1, turns):
        names = list(tasks)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = tasks[name]()
            if turn >= 0:
                found[name].append(taken)
    return found


def compare(pair: str, what: str, kind: str, times: dict, device: str = "cpu") -> dict:
    """Return a row of the table from the turns of two.

    Args:
        pair: what is compared.
        what: what was measured.
        kind: `TIME` divides our time by theirs, `SPEED` theirs by ours.
        times: what `take_turns` returned; ours comes first.
        device: on a GPU the process's time says nothing.
    """
    (ours, our_turns), (theirs, their_turns) = times.items()
    row = {"pair": pair, "what": what, "kind": kind, "ours": ours, "theirs": theirs, "turns": times}
    for clock in ("wall", "cpu") if device == "cpu" else ("wall",):
        ratios = [one[clock] / other[clock] for one, other in zip(our_turns, their_turns, strict=True)]
        if kind == SPEED:
            ratios = [1 / ratio for ratio in ratios]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row[clock] = {"ratio": middle, "low": low, "high": high}
        row[f"{clock}_seconds"] = [statistics.median(turn[clock] for turn in turns) for turns in times.values()]
    return row


def compare_sizes(pair: str, what: str, ours: str, theirs: str, numbers) -> dict:
    """Return a row of the table from two numbers of bytes."""
    our_bytes, their_bytes = numbers
    return {
        "pair": pair,
        "what": what,
        "kind": SIZE,
        "ours": ours,
        "theirs": theirs,
        "ratio": our_bytes / their_bytes,
        "bytes": [our_bytes, their_bytes],
    }


# --- what is measured ---


class Training:
    """A model in training, with fairseq's criterion and optimizer."""

    def __init__(self, name: str, args):
        self.device = args.device
        self.model = build(name, args).train()
        self.sample = random_batch(*sizes(args.batch), args)
        task = filler_task(args.vocab_size, args.vocab_size)
        self.criterion = LabelSmoothedCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=0.1)
        self.optimizer = Adam(self.model.parameters(), lr=1e-5)
        self.run()
        self.update()

    def run(self) -> None:
        """Run forward and backward."""
        self.model.zero_grad()
        loss, sample_size, _ = self.criterion(self.model, self.sample)
        (loss / sample_size).backward()

    def update(self) -> None:
        """Run the optimizer."""
        self.optimizer.step()

    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and Adam's moments."""
        parameters = list(self.model.parameters())
        moments = [
            value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return sum(tensor.nbytes for tensor in (*parameters, *gradients, *moments))

    def peak_bytes(self) -> int:
        """Return the most bytes that the process, or on a GPU torch, has held; two updates are enough to get there."""
        for _ in range(2):
            self.run()
            self.update()
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def save(self, path: Path, with_optimizer: bool) -> int:
        """Write a checkpoint and return its bytes; `load` reads the last one."""
        state = {"model": self.model.state_dict()}
        if with_optimizer:
            state["last_optimizer_state"] = self.optimizer.state_dict()
        torch.save(state, path)
        self.path = path
        return path.stat().st_size

    def load(self) -> None:
        """Load the model from the checkpoint."""
        self.model.load_state_dict(torch.load(self.path, map_location=self.device)["model"])


class Decoding:
    """A model that only decodes, as fairseq-generate prepares it."""

    def __init__(self, name: str, args):
        self.args = args
        self.model = build(name, args).eval()
        self.model.prepare_for_inference_(OmegaConf.create({"generation": {"beam": BEAM, "print_alignment": None}}))

    def prepare(self, sentences: int, length: int) -> None:
        """Take a batch to translate; all beams run to the length."""
        self.sample = random_batch(sentences, length, self.args)
        self.sample["net_input"].pop("prev_output_tokens")
        dictionary = filler_task(self.args.vocab_size, self.args.vocab_size).target_dictionary
        limits = {"max_len_b": length - 1, "min_len": length - 1}
        self.search = SequenceGenerator([self.model], dictionary, beam_size=BEAM, **limits)

    def translate(self) -> None:
        """Search."""
        self.search.generate([self.model], self.sample)

    @torch.no_grad()
    def cache_bytes(self) -> int:
        """Return the bytes of the decoder's caches of the encoder output after one step."""
        inputs = random_batch(8, 30, self.args)["net_input"]
        state = {}
        encoded = self.model.encoder(inputs["src_tokens"], inputs["src_lengths"])
        self.model.decoder(inputs["prev_output_tokens"][:, :1], encoder_out=encoded, incremental_state=state)
        tensors = {
            tensor.data_ptr(): tensor.nbytes
            for layer in self.model.decoder.layers
            for tensor in layer.encoder_attn._get_input_buffer(state).values()
            if tensor is not None and tensor.dim() == 4
        }
        return sum(tensors.values())


class Albert:
    """A masked language model, `albert_encoder` or transformers' ALBERT.

    Both use torch's scaled dot-product attention and no dropout; 15% of the symbols are masked.
    """

    def __init__(self, ours: bool, config: dict, sentences: int, device: str):
        generator = torch.Generator().manual_seed(0)
        vocabulary = config["vocab_size"]
        self.tokens = torch.randint(4, vocabulary, (sentences, ALBERT_LENGTH), generator=generator).to(device)
        self.masked = (torch.rand(sentences, ALBERT_LENGTH, generator=generator) < 0.15).to(device)
        self.labels = self.tokens.masked_fill(~self.masked, -100)
        self.ours = ours
        self.model = (self.build_ours(config) if ours else self.build_theirs(config)).to(device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)

    @staticmethod
    def build_ours(config: dict):
        flags = [
            *("--encoder-layers", config["num_hidden_layers"], "--encoder-embed-dim", config["hidden_size"]),
            *("--encoder-ffn-embed-dim", config["intermediate_size"], "--dropout", 0, "--attention-dropout", 0),
            *("--encoder-attention-heads", config["num_attention_heads"]),
        ]
        task = filler_task(config["vocab_size"] - 1, config["vocab_size"] - 1)  # fairseq adds the mask symbol
        task.mask_idx = task.source_dictionary.add_symbol("<mask>")
        return build_model(parse_architecture("albert_encoder", list(map(str, flags))), task)

    @staticmethod
    def build_theirs(config: dict):
        from transformers import AlbertConfig, AlbertForMaskedLM

        return AlbertForMaskedLM(AlbertConfig(**config, attn_implementation="sdpa"))

    def features(self):
        """Return the encoder's output."""
        if self.ours:
            return self.model(self.tokens, features_only=True)[0]
        return self.model.albert(self.tokens).last_hidden_state

    @torch.no_grad()
    def forward(self) -> None:
        """Run the encoder."""
        self.features()

    def backward(self) -> None:
        """Run the encoder forward and backward."""
        self.features().square().mean().backward()

    def step(self) -> None:
        """Run an update of masked language modelling."""
        self.optimizer.zero_grad()
        if self.ours:
            scores = self.model(self.tokens, masked_tokens=self.masked)[0]
            loss = torch.nn.functional.cross_entropy(scores, self.tokens[self.masked])
        else:
            loss = self.model(self.tokens, labels=self.labels).loss
        loss.backward()
        self.optimizer.step()


@contextlib.contextmanager
def in_processes(kind: type, arguments: dict[str, tuple]):
    """Give each name a process with an object of this kind; end them afterwards."""
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, values in arguments.items():
            processes[name] = Process(kind, *values)
            stack.callback(processes[name].close)
        for process in processes.values():
            process.started.result()
        yield processes


def repeat(measure, args) -> list[dict]:
    """Return the rows that `measure` returns, with the turns of `--repeats` calls; each starts new processes."""
    return [join(rows, args) for rows in zip(*(measure() for _ in range(args.repeats)), strict=True)]


def join(rows, args) -> dict:
    """Return one row of the table from the same row measured several times: all turns, or the first of the sizes."""
    first = rows[0]
    if first["kind"] == SIZE:
        return first
    turns = {name: [turn for row in rows for turn in row["turns"][name]] for name in first["turns"]}
    return {**first, **compare(first["pair"], first["what"], first["kind"], turns, args.device)}


def compare_method(pair: str, what: str, kind: str, method: str, processes: dict, args) -> dict:
    """Return a row of the table: how long a method takes in each of two processes, by turns."""
    tasks = {name: partial(process.time, method, args.device) for name, process in processes.items()}
    return compare(pair, what, kind, take_turns(tasks, args.turns), args.device)


def measure_training(pair: str, ours: str, theirs: str, measures, args) -> list[dict]:
    """Compare training steps, optimizer steps, their memory and checkpoints."""
    rows = []
    with in_processes(Training, {name: (name, args) for name in (ours, theirs)}) as processes:
        if "train" in measures:
            kind = SPEED if theirs == "universal" else TIME
            rows.append(compare_method(pair, f"training step, {args.batch}", kind, "run", processes, args))
        if "optimizer" in measures:
            rows.append(compare_method(pair, "optimizer step", TIME, "update", processes, args))
        for measure, what, method in (
            ("memory", "parameters, gradients and Adam", "state_bytes"),
            ("peak", "peak of a training process", "peak_bytes"),
        ):
            if measure in measures:
                rows.append(compare_sizes(pair, what, ours, theirs, [each.call(method) for each in processes.values()]))
        if "checkpoint" in measures:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure_checkpoints(pair, processes, Path(folder), args)
    return rows


def measure_checkpoints(pair: str, processes: dict, folder: Path, args) -> list[dict]:
    """Compare files with and without the optimizer's state, and how long the model takes to load."""
    rows, (ours, theirs) = [], processes
    for what, with_optimizer in (("checkpoint with optimizer", True), ("checkpoint, model only", False)):
        numbers = [each.call("save", folder / f"{name}.pt", with_optimizer) for name, each in processes.items()]
        rows.append(compare_sizes(pair, what, ours, theirs, numbers))
    return [*rows, compare_method(pair, "loading the model", TIME, "load", processes, args)]


def measure_decoding(pair: str, ours: str, theirs: str, measures, args) -> list[dict]:
    """Compare beam search as fairseq-generate runs it, and the bytes of the cross-attention's caches."""
    rows = []
    with in_processes(Decoding, {name: (name, args) for name in (ours, theirs)}) as processes:
        for text in args.decode if "decode" in measures else []:
            sentences, length = sizes(text)
            for process in processes.values():
                process.call("prepare", sentences, length)
            rows.append(compare_method(pair, f"decoding, {text}, beam {BEAM}", SPEED, "translate", processes, args))
            rows[-1]["tokens"] = sentences * length
        if "cache" in measures:
            numbers = [process.call("cache_bytes") for process in processes.values()]
            rows.append(compare_sizes(pair, "caches of the source in decoding", ours, theirs, numbers))
    return rows


def measure_import(args) -> list[dict]:
    """Compare the start of fairseq-train with and without the plugin, in processes of their own."""
    codes = {"with the plugin": "import fairseq_cli.train, fairseq_sharing", "fairseq": "import fairseq_cli.train"}
    found = {name: [] for name in codes}
    for turn, (name, code) in itertools.product(range(-1, min(args.repeats * args.turns, 5)), codes.items()):
        clock, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if turn >= 0:
            found[name].append({"wall": time.perf_counter() - clock, "cpu": cpu})
    row = compare("import", "start of fairseq-train", TIME, found)
    row["added_seconds"] = {clock: row[f"{clock}_seconds"][0] - row[f"{clock}_seconds"][1] for clock in ("wall", "cpu")}
    return [row]


def measure_albert(args) -> list[dict]:
    """Compare `albert_encoder` with transformers' ALBERT: forward, forward and backward, a masked-LM step."""
    if importlib.util.find_spec("transformers") is None:
        print("albert: skipped, there is no package transformers", file=sys.stderr)
        return []
    sentences = 2 if args.short else 4
    models = {"albert_encoder": True, "AlbertForMaskedLM": False}
    with in_processes(Albert, {name: (ours, ALBERT, sentences, args.device) for name, ours in models.items()}) as both:
        return [
            compare_method("albert", f"{what}, {sentences}x{ALBERT_LENGTH}", kind, method, both, args)
            for what, kind, method in (
                ("encoder, forward", TIME, "forward"),
                ("encoder, forward and backward", TIME, "backward"),
                (f"masked-LM step, V={ALBERT['vocab_size']:,}", SPEED, "step"),
            )
        ]


def measure_ctranslate2(args) -> None:
    """Export a trained model in fp32 and int8; `fairseq-sharing export --benchmark` holds each against fairseq."""
    for quantization in ("float32", "int8"):
        print(f"\nctranslate2, {quantization}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            words = [
                *(sys.executable, "-m", "fairseq_sharing.tools.main", "export", args.checkpoint, "--to", "ctranslate2"),
                *("--quantization", quantization, "--data", args.data, "--benchmark", args.subset, "--beam", BEAM),
                *("--out", Path(folder) / "export"),
            ]
            subprocess.run(list(map(str, words)), check=True)


# --- the table ---


def describe_settings(args) -> dict:
    """Return what the numbers depend on: the arguments without paths, torch's version and threads."""
    paths = ("out", "checkpoint", "data")
    known = {name: value for name, value in vars(args).items() if name not in paths}
    return {**known, "torch": torch.__version__, "threads": torch.get_num_threads()}


def format_table(rows: list[dict], args) -> str:
    """Return the rows as Markdown, ratios first."""
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {threads}"
    lines = [
        f"{where}; torch {torch.__version__}; N={args.layers}, M={args.sets}, width {args.width}, "
        f"V={args.vocab_size:,}; median of {args.repeats} x {args.turns} turns (quartiles)",
        "",
        "| | | ratio, clock | ratio, processor | ours | theirs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["kind"] == SIZE:
            ratios = [f"{row['ratio']:.3f}", ""]
            values = [f"{name}: {number:,} bytes" for name, number in zip(names(row), row["bytes"], strict=True)]
        else:
            ratios = [
                "{ratio:.3f} ({low:.3f} to {high:.3f})".format(**row[clock]) if clock in row else ""
                for clock in ("wall", "cpu")
            ]
            values = [f"{name}: {seconds(row, index)}" for index, name in enumerate(names(row))]
        label = row["what"] + {TIME: " (time)", SPEED: " (speed)", SIZE: ""}[row["kind"]]
        lines.append(f"| {row['pair']} | {label} | {ratios[0]} | {ratios[1]} | {values[0]} | {values[1]} |")
    return "\n".join(lines) + "\n"


def names(row: dict) -> tuple[str, str]:
    return row["ours"], row["theirs"]


def seconds(row: dict, index: int) -> str:
    """Return the median time of one of the two, and its tokens per second where tokens were counted."""
    taken = row["wall_seconds"][index]
    return f"{taken:.3f} s" + (f", {row['tokens'] / taken:,.0f} tokens/s" if "tokens" in row else "")


def main(arguments=None) -> None:
    args = parse_arguments(arguments)
    rows = []

    def show(new: list[dict]) -> None:
        rows.extend(new)
        for row in new:
            ratio = row["ratio"] if row["kind"] == SIZE else row["wall"]["ratio"]
            print(f"{row['pair']}: {row['what']}: {ratio:.3f}", file=sys.stderr, flush=True)

    for pair, (ours, theirs, measured) in PAIRS.items():
        if args.pair is not None and pair not in args.pair:
            continue
        if args.short and args.measure is None:
            measured = SHORT.get(pair, ())
        measures = [name for name in measured if args.measure is None or name in args.measure]
        if set(measures) & {"train", "optimizer", "memory", "peak", "checkpoint"}:
            show(repeat(partial(measure_training, pair, ours, theirs, measures, args), args))
        if set(measures) & {"decode", "cache"}:
            show(repeat(partial(measure_decoding, pair, ours, theirs, measures, args), args))
    if args.pair is None:
        if args.measure is None or "import" in args.measure:
            show(measure_import(args))
        if args.measure is None or "albert" in args.measure:
            show(repeat(partial(measure_albert, args), args))
    table = format_table(rows, args)
    if rows:
        print(table)
    if args.out is not None:
        Path(f"{args.out}.md").write_text(table, encoding="utf-8")
        text = json.dumps({"settings": describe_settings(args), "rows": rows}, indent=1)
        Path(f"{args.out}.json").write_text(f"{text}\n", encoding="utf-8")
    if args.checkpoint is not None and (args.measure is None or "ctranslate2" in args.measure):
        measure_ctranslate2(args)


if __name__ == "__main__":
    main()
