"""What `compare` compares: its arguments and YAML files, read into configurations that can be built."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Entry:
    """One configuration to compare.

    Attributes:
        name: what the table calls it.
        arch: its architecture, or None for a checkpoint.
        flags: flags of fairseq-train.
        path: its checkpoint, or None.
        vocab_size: symbols in each dictionary, or None.
        data: a folder with dictionaries, or None.
        subject: the model, once it is built.
        notes: what was changed to make it equal to others.
    """

    name: str
    arch: str | None = None
    flags: list[str] = field(default_factory=list)
    path: str | None = None
    vocab_size: int | None = None
    data: str | None = None
    subject: object = None
    notes: list[str] = field(default_factory=list)

    def build(self, *more: str) -> None:
        """Build the model, with these flags in addition.

        Raises:
            ValueError: with the entry's name, where something is wrong with it.
        """
        from . import model

        try:
            if self.path is not None:
                self.subject = model.read_checkpoint(self.path, self.name)
            else:
                self.flags = [*self.flags, *more]
                self.subject = model.read_architecture(self.arch, self.flags, self.vocab_size, self.data, self.name)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.subject.model.parameters())


def read_entries(args) -> list[Entry]:
    """Return what is to be compared, with names that tell the entries apart.

    Raises:
        ValueError: a file cannot be read, or a configuration has no arch and no path.
    """
    entries = []
    for word in args.models:
        if Path(word).suffix.lower() in (".yaml", ".yml"):
            entries += read_yaml(Path(word))
        elif Path(word).suffix == ".pt" or Path(word).is_file():
            entries.append(Entry(word, path=word))
        else:
            entries.append(Entry(word, arch=word))
    for entry in entries:
        if entry.path is None:
            entry.flags += args.extra
            if args.vocab_size is not None:
                entry.vocab_size, entry.data = args.vocab_size, None
            if args.data is not None:
                entry.vocab_size, entry.data = None, args.data
    if args.extra and all(entry.path is not None for entry in entries):
        raise ValueError(f"{args.extra[0]} is a flag of architectures, and only checkpoints are compared")
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice: give different configurations different names in a YAML file")
    return entries


def read_yaml(path: Path) -> list[Entry]:
    """Read named configurations.

    Raises:
        ValueError: no such file, no YAML, or not of the form that `compare` describes.
    """
    import yaml

    try:
        named = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(named, dict) or not named or not all(isinstance(each, dict) for each in named.values()):
        raise ValueError(f"{path} must name configurations, such as 'Vanilla: {{arch: transformer}}'")
    entries = []
    for name, values in named.items():
        values = dict(values)
        arch, checkpoint = values.pop("arch", None), values.pop("path", None)
        if (arch is None) == (checkpoint is None):
            raise ValueError(f"{path}: {name} needs either arch or path")
        if checkpoint is not None and values:
            raise ValueError(f"{path}: {name} is a checkpoint and takes no {next(iter(values))}")
        entry = Entry(str(name), arch, path=checkpoint and str(checkpoint))
        entry.vocab_size, entry.data = values.pop("vocab_size", None), values.pop("data", None)
        for key, value in values.items():
            if isinstance(value, dict):
                raise ValueError(f"{path}: {key} of {name} must be one value")
            flag = "--" + str(key).replace("_", "-")
            if value is True:
                entry.flags.append(flag)
            elif value is not False and value is not None:  # 0 is a value
                entry.flags += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        entries.append(entry)
    return entries
