"""`fairseq-sharing compare`: tables, equal sizes, pictures and refusals."""

import json
import textwrap

import pytest
from conftest import FOUR_FROM_TWO, TINY, build, parse
from torch import save

from fairseq_sharing.tools.main import main

LM = [
    *("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2"),
    *("--decoder-layers", "4", "--decoder-input-dim", "16", "--decoder-output-dim", "16"),
]
TWO = ["transformer", "transformer_shared_universal"]
SMALL = [*TINY, "--encoder-layers", "3", "--decoder-layers", "3", "--share-all-embeddings", "--vocab-size", "40"]
C, F, V = 16, 32, 40


def count(width: int, ffn: int, sets: int) -> int:
    """Return unique parameters with tied embeddings and so many sets in each stack."""
    attention, norm = 4 * (width * width + width), 2 * width
    feed = 2 * width * ffn + ffn + width
    return V * width + sets * ((attention + feed + 2 * norm) + (2 * attention + feed + 3 * norm))


def compare(capsys, *argv) -> dict:
    """Run the command with --json; return what it prints."""
    assert main(["compare", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, *argv) -> str:
    """Run the command, which must fail; return the sentence behind whatever progress it reports."""
    assert main(["compare", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and [line for line in lines if "error: " in line] == lines[-1:]
    return lines[-1]


def test_universal_is_widened_to_a_budget(capsys):
    """To the width that comes closest, in steps of 8; the FFN stays twice as wide, the heads stay two."""
    budget = count(C, F, 3)
    found = compare(capsys, *TWO, *SMALL, "--match-params", "transformer")
    first, second = found["models"]
    assert first["total_parameters"]["unique"] == budget and first["stacks"]["encoder"]["width"] == C
    best = min(range(8, 200, 8), key=lambda width: abs(count(width, 2 * width, 1) - budget))
    sizes = [second["stacks"][stack][name] for stack in ("encoder", "decoder") for name in ("width", "ffn", "heads")]
    assert sizes == [best, 2 * best, 2] * 2 and best > C
    assert second["total_parameters"]["unique"] == count(best, 2 * best, 1)
    (note,) = found["notes"]
    assert f"width 16 -> {best} (FFN {2 * best}, 2 heads)" in note and "multiples of 8" in note


def test_equal_parameters_narrows_what_is_larger(capsys):
    """Language models, whose embeddings stay as wide as the layers; the first model stays as it is."""

    def language_model(width: int) -> int:  # Post-LN, output not tied; the FFN keeps its ratio to the width
        attention, feed = 4 * (width * width + width), 2 * width * width + 2 * width
        return 2 * V * width + 2 * (attention + feed + 4 * width)

    archs = ["transformer_lm_shared_universal", "transformer_lm"]
    flags = [*LM, "--decoder-embed-dim", "32", "--decoder-input-dim", "32", "--decoder-output-dim", "32"]
    found = compare(capsys, *archs, *flags, "--decoder-layers", 2, "--vocab-size", V, "--equal", "parameters")
    sizes = [each["total_parameters"]["unique"] for each in found["models"]]
    widths = [each["stacks"]["decoder"]["width"] for each in found["models"]]
    best = min(range(8, 64, 8), key=lambda width: abs(language_model(width) - sizes[0]))
    assert widths == [32, best] and best < 32 and sizes[1] == language_model(best)
    assert found["models"][1]["parameters"]["embeddings"]["unique"] == V * best  # no projection appeared


def test_equal_depth_from_yaml_with_pictures(tmp_path, capsys):
    """Named configurations; flags on the line hold for all."""
    (tmp_path / "models.yaml").write_text(
        textwrap.dedent(
            """\
            Vanilla: {arch: transformer, encoder_layers: 3, decoder_layers: 3, share_all_embeddings: true}
            CYCLE:
              arch: transformer_shared_cycle
              encoder_unique_layers: 2
              decoder-unique-layers: 3
              share_all_embeddings: true
              no_scale_embedding: false
            "parts":
              {arch: transformer_shared_sequence, encoder_assignment: [0, 0, 1], encoder_layers: 3,
               decoder_unique_layers: 3}
            """
        )
    )
    pictures = tmp_path / "a.png", tmp_path / "a.svg"
    out = [word for picture in pictures for word in ("--out", str(picture))]
    common = [*TINY, "--vocab-size", "40"]
    found = compare(capsys, tmp_path / "models.yaml", *common, "--equal", "depth", *out)
    assert [each["name"] for each in found["models"]] == ["Vanilla", "CYCLE", "parts"]
    depths = [[each["stacks"][stack]["layers"] for stack in ("encoder", "decoder")] for each in found["models"]]
    assert depths == [[3, 3]] * 3
    assert found["models"][2]["stacks"]["encoder"]["assignment"] == [0, 0, 1]
    flops = [each["total_flops"] for each in found["models"]]
    assert flops[0] == flops[1] == flops[2]  # no decoder shares, and an encoder's sharing saves no computation
    assert [note.partition(":")[0] for note in found["notes"]] == ["CYCLE", "parts"]
    assert pictures[0].read_bytes().startswith(b"\x89PNG") and "</svg>" in pictures[1].read_text("utf-8")
    assert "exists: remove it or add --force" in fails(capsys, "transformer", "--out", pictures[0])


def test_a_value_of_zero_is_one(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(
        "no: {arch: transformer, dropout: 0}\nsome: {arch: transformer, dropout: 0.1}\n", "utf-8"
    )
    found = compare(capsys, tmp_path / "a.yaml", *TINY, "--vocab-size", "40", "--activation-memory", "8")
    sizes = [each["activations"] for each in found["models"]]
    assert sizes[0] < sizes[1]


def test_table_of_architecture_and_checkpoint(tmp_path, capsys):
    flags = [*TINY, *FOUR_FROM_TWO]
    args = parse("transformer_shared_cycle_rev", *flags)
    args._name = "transformer_shared_cycle_rev"
    model = build("transformer_shared_cycle_rev", *flags)
    path = tmp_path / "a.pt"
    save({"cfg": {"model": args}, "model": model.state_dict()}, path)
    command = ["compare", str(path), "transformer_lm", *LM, "--vocab-size", "40", "--markdown"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    rows = {
        cells[1].strip(): cells[2:4] for cells in (line.split("|") for line in shown.splitlines()) if len(cells) > 3
    }
    assert [cell.strip() for cell in rows["encoder: N / M"]] == ["4 / 2", ""]
    unique = sum(parameter.numel() for parameter in model.parameters())
    assert rows["unique parameters"][0].strip() == f"{unique:,}"
    assert "Sharing saves parameters" in shown and "32 tokens of source and 32 tokens of target or 512 tokens" in shown


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is no YAML"),
        ("- a", "must name configurations"),
        ("a: {share_all_embeddings: true}", "a needs either arch or path"),
        ("a: {path: x.pt, encoder_layers: 3}", "a is a checkpoint and takes no encoder_layers"),
        ("a: {arch: transformer, encoder: {layers: 3}}", "encoder of a must be one value"),
        ("a: {arch: spiral}", "a: --arch spiral is not known"),
        ("a: {arch: transformer, no_such_flag: 3}", "a: --arch transformer has no --no-such-flag"),
        ("a: {path: missing.pt}", "a: there is no file missing.pt"),
    ],
)
def test_wrong_yaml(tmp_path, capsys, text, sentence):
    (tmp_path / "a.yaml").write_text(text)
    assert sentence in fails(capsys, tmp_path / "a.yaml")


def test_refusals(tmp_path, capsys):
    assert "cannot read" in fails(capsys, tmp_path / "none.yaml")
    assert "transformer is given twice" in fails(capsys, "transformer", "transformer")
    assert "must end in .png or .svg" in fails(capsys, "transformer", "--out", tmp_path / "a.pdf")
    assert "is a flag of architectures" in fails(capsys, "a.pt", "--encoder-layers", "3")
    sentence = fails(capsys, *TWO, *SMALL, "--match-params", "many")
    assert "--match-params many is neither a number of parameters nor the name" in sentence
    assert "at its least width 8 already" in fails(capsys, *TWO, *SMALL, "--match-params", "100")
    assert "needs a Universal model" in fails(capsys, "transformer", *SMALL, "--match-params", "1M")
    different = [*SMALL, "--decoder-embed-dim", "32", "--encoder-embed-dim", "16"]
    different.remove("--share-all-embeddings")
    assert "has stacks of widths 16 and 32" in fails(capsys, *TWO[1:], *different, "--match-params", "1M")
    assert not list(tmp_path.iterdir())
